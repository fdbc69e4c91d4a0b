/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs that a process may use: those of /proc/driver/nvidia whose node opens or would open (ENXIO, ENODEV: the
 * device rules let us through, there is just no driver behind it). Shared by the simulated NVML and libcuda.
 */
#ifndef VISIBLE_H
#define VISIBLE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define GPUS 64

struct gpu {
	unsigned domain, bus, device, function; /* first: by_bus_id compares them as they stand */
	unsigned minor, device_id, subsystem_id, brand, architecture;
	int compute_major, compute_minor, mig, numa_node;
	char uuid[80], name[96];
};

static struct gpu gpus[GPUS];
static unsigned gpu_count;

/* 1: the device rules and the mode let us open it, and it is the node of that minor: which GPU answers is decided by
 * the number and not by the name. */
static int reachable(const char *node, unsigned number)
{
	struct stat status;
	int fd = open(node, O_RDWR | O_CLOEXEC), open_error = errno;

	if (fd >= 0)
		close(fd);
	if (fd < 0 && open_error != ENXIO && open_error != ENODEV) {
		errno = open_error;
		return 0;
	}
	return stat(node, &status) == 0 && S_ISCHR(status.st_mode) && minor(status.st_rdev) == number;
}

static int by_bus_id(const void *left, const void *right)
{
	const unsigned *a = left, *b = right;

	for (int i = 0; i < 4; i++)
		if (a[i] != b[i])
			return a[i] < b[i] ? -1 : 1;
	return 0;
}

static void read_information(const char *bus_id)
{
	struct gpu *gpu = &gpus[gpu_count];
	char path[128], line[256];
	FILE *file;
	int known = 0;

	snprintf(path, sizeof(path), "/proc/driver/nvidia/gpus/%.32s/information", bus_id);
	file = fopen(path, "re");
	if (!file)
		return;
	*gpu = (struct gpu){.device_id = 0x233510de, .brand = 14, .architecture = 9, .compute_major = 9, .numa_node = -1};
	known += sscanf(bus_id, "%x:%x:%x.%x", &gpu->domain, &gpu->bus, &gpu->device, &gpu->function) == 4;
	while (fgets(line, sizeof(line), file)) {
		sscanf(line, "Model: %95[^\n]", gpu->name);
		sscanf(line, "GPU UUID: %79s", gpu->uuid);
		known += sscanf(line, "Device Minor: %u", &gpu->minor) == 1;
	}
	fclose(file);
	snprintf(path, sizeof(path), "/dev/nvidia%u", gpu->minor);
	if (known == 2 && reachable(path, gpu->minor))
		gpu_count++;
}

/* Fills `gpus` in the order of their bus ids. */
static void find_gpus(void)
{
	struct dirent *entry;
	DIR *folder = opendir("/proc/driver/nvidia/gpus");

	gpu_count = 0;
	while (folder && (entry = readdir(folder)) && gpu_count < GPUS)
		read_information(entry->d_name);
	if (folder)
		closedir(folder);
	qsort(gpus, gpu_count, sizeof(*gpus), by_bus_id);
}

#endif
