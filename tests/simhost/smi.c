/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated nvidia-smi: lists what NVML sees, as `nvidia-smi -L` does; without -L also the versions. With `topo -m`
 * every GPU is linked to every other by NVLink. */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *device;

static void *library;

static void *symbol(const char *name)
{
	void *address = dlsym(library, name);

	if (!address)
		fprintf(stderr, "nvidia-smi: libnvidia-ml.so.1 has no %s\n", name);
	return address;
}

static int topology(unsigned count)
{
	printf("\t\033[4m");
	for (unsigned i = 0; i < count; i++)
		printf("GPU%u\t", i);
	printf("CPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n");
	for (unsigned row = 0; row < count; row++) {
		printf("GPU%u\t", row);
		for (unsigned i = 0; i < count; i++)
			printf(i == row ? " X \t" : "NV18\t");
		printf("0-15\t0\t\tN/A\n");
	}
	return 0;
}

int main(int argc, char **argv)
{
	int (*init)(void), (*count_of)(unsigned *), (*handle_of)(unsigned, device *);
	int (*name_of)(device, char *, unsigned), (*uuid_of)(device, char *, unsigned);
	int (*version)(char *, unsigned), (*cuda)(int *);
	const char *(*text)(int);
	char name[96], uuid[96], driver[80];
	unsigned count = 0;
	int result, cuda_version;
	device handle;

	library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "nvidia-smi: %s\n", dlerror());
		return 12;
	}
	if (!(init = symbol("nvmlInit_v2")) || !(text = symbol("nvmlErrorString")) ||
	    !(count_of = symbol("nvmlDeviceGetCount_v2")) || !(handle_of = symbol("nvmlDeviceGetHandleByIndex_v2")) ||
	    !(name_of = symbol("nvmlDeviceGetName")) || !(uuid_of = symbol("nvmlDeviceGetUUID")) ||
	    !(version = symbol("nvmlSystemGetDriverVersion")) || !(cuda = symbol("nvmlSystemGetCudaDriverVersion_v2")))
		return 13;

	result = init();
	if (result) {
		printf("Failed to initialize NVML: %s\n", text(result));
		return result;
	}
	if (argc > 1 && !strcmp(argv[1], "topo"))
		return count_of(&count) || topology(count);
	if ((argc < 2 || strcmp(argv[1], "-L")) && !version(driver, sizeof(driver)) && !cuda(&cuda_version))
		printf("NVIDIA-SMI %s  Driver Version: %s  CUDA Version: %d.%d\n", driver, driver, cuda_version / 1000,
		       cuda_version % 1000 / 10);
	count_of(&count);
	if (!count)
		return printf("No devices found.\n") < 0 ? 1 : 6;
	for (unsigned i = 0; i < count; i++) {
		result = handle_of(i, &handle);
		if (!result)
			result = name_of(handle, name, sizeof(name));
		if (!result)
			result = uuid_of(handle, uuid, sizeof(uuid));
		if (result)
			printf("Unable to determine the device handle for GPU %u: %s\n", i, text(result));
		else
			printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
	}
	return 0;
}
