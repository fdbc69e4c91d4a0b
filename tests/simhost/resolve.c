/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resolve [-s] SONAME...: asks the container's own loader for each name and prints what it opened:
 *     SONAME PATH          or with -s      SONAME PATH DEVICE:INODE      (as stat -c %d:%i)
 * A name that doesn't load is printed as `SONAME - REASON`, and the exit status is 1.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static int resolve(const char *name, int with_identity)
{
	struct link_map *map;
	struct stat st;
	void *library = dlopen(name, RTLD_LAZY);

	if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) {
		printf("%s - %s\n", name, dlerror());
		return 1;
	}
	printf("%s %s", name, map->l_name);
	if (with_identity) {
		if (stat(map->l_name, &st)) {
			printf(" -\n");
			return 1;
		}
		printf(" %lu:%lu", (unsigned long)st.st_dev, (unsigned long)st.st_ino);
	}
	printf("\n");
	return 0;
}

int main(int argc, char **argv)
{
	int first = argc > 1 && strcmp(argv[1], "-s") == 0 ? 2 : 1;
	int failed = 0;

	for (int i = first; i < argc; i++)
		failed |= resolve(argv[i], first == 2);
	return failed;
}
