/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated libcuda: it tells its version, and shows the GPUs that this process may use. Kernels run on the CPU,
 * as tests/unit/fakecuda.c does them; its environment variables make these devices fail too, but for the number.
 */
#define _GNU_SOURCE
#include "visible.h"

#include <stdint.h>
#include <string.h>

#define CONTROL_MINOR 255

/* Which driver a program really got: the file's own version, whatever link it was found through. */
const char *simulated_driver_version(void)
{
	return DRIVER_VERSION;
}

static int devices(void)
{
	static int asked;

	if (!asked++ && reachable("/dev/nvidiactl", CONTROL_MINOR) && reachable("/dev/nvidia-uvm", 0))
		find_gpus();
	return gpu_count;
}

static void name_of(int ordinal, char *name, int size)
{
	snprintf(name, size, "%s", gpus[ordinal].name);
}

static void uuid_of(int ordinal, unsigned char *uuid)
{
	const char *at = gpus[ordinal].uuid + strlen("GPU-");

	for (int i = 0; i < 16; i++, at += 2) {
		at += *at == '-';
		sscanf(at, "%2hhx", &uuid[i]);
	}
}

static void bus_id_of(int ordinal, char *bus_id, int size)
{
	struct gpu *gpu = &gpus[ordinal];

	snprintf(bus_id, size, "%04x:%02x:%02x.%x", gpu->domain, gpu->bus, gpu->device, gpu->function);
}

#define SIMULATED
#include "../unit/fakecuda.c"
