/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated libnvidia-ml.so.1: the entry points that nvidia-ml-py uses for discovery, with NVML's own names
 * and signatures.
 *
 * Beside the library stands a folder simulated-nvml/ (tests/simhost/nvml.py writes it):
 *   nvml.conf  what to answer, one thing a line (`load_configuration` has the forms)
 *   calls      with `record`, each call appends `PID NAME GPU`, GPU being NVML's index or -1
 * Without the folder, as in a container that was given the library alone, the GPUs are those of visible.h.
 */

#define _GNU_SOURCE
#include "visible.h"

#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define FAULTS 64
#define MIGS 256
#define CONTROL_MINOR 255

enum {
	SUCCESS = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	LIB_RM_VERSION_MISMATCH = 18,
	UNKNOWN = 999,
};

struct fault {
	char call[64]; /* the beginning of a function's name */
	int gpu;       /* NVML's index, or -1: whichever */
	unsigned delay_ms;
	int result;
	char action[16]; /* return, hang, crash */
};

/* A handle of NVML's is one of either kind, told apart by where it points. */
struct mig {
	unsigned gpu, gi, ci; /* `gpu`: NVML's index of its parent */
	char uuid[80], profile[32];
};

static struct mig migs[MIGS];
static struct fault faults[FAULTS];
static unsigned mig_count, fault_count, sessions;
static char driver_version[80] = DRIVER_VERSION, nvml_version[80] = NVML_VERSION, calls_path[PATH_MAX];
static int cuda_version = CUDA_VERSION, configured;

static void own_folder(char *folder, const char *name)
{
	Dl_info info;
	char real[PATH_MAX];

	folder[0] = '\0';
	if (!dladdr((void *)own_folder, &info) || !realpath(info.dli_fname, real))
		return;
	*strrchr(real, '/') = '\0';
	if (snprintf(folder, PATH_MAX, "%s/simulated-nvml/%s", real, name) >= PATH_MAX)
		folder[0] = '\0';
}

static void load_configuration(FILE *file)
{
	char line[512];
	int record;

	gpu_count = mig_count = fault_count = 0;
	calls_path[0] = '\0';
	while (fgets(line, sizeof(line), file)) {
		struct gpu *gpu = &gpus[gpu_count];
		struct fault *fault = &faults[fault_count];
		struct mig *mig = &migs[mig_count];

		if (sscanf(line, "driver %79s", driver_version) == 1 || sscanf(line, "nvml %79s", nvml_version) == 1 ||
		    sscanf(line, "cuda %d", &cuda_version) == 1)
			continue;
		if (sscanf(line, "record %d", &record) == 1) {
			if (record)
				own_folder(calls_path, "calls");
		} else if (gpu_count < GPUS &&
			   sscanf(line, "gpu %x:%x:%x.%x %79s %u %x %x %u %u %d %d %d %d %95[^\n]", &gpu->domain, &gpu->bus,
				  &gpu->device, &gpu->function, gpu->uuid, &gpu->minor, &gpu->device_id, &gpu->subsystem_id,
				  &gpu->brand, &gpu->architecture, &gpu->compute_major, &gpu->compute_minor, &gpu->mig,
				  &gpu->numa_node, gpu->name) == 15) {
			gpu_count++;
		} else if (mig_count < MIGS &&
			   sscanf(line, "mig %u %u %u %79s %31s", &mig->gpu, &mig->gi, &mig->ci, mig->uuid,
				  mig->profile) == 5) {
			mig_count++;
		} else if (fault_count < FAULTS && sscanf(line, "fault %63s %d %u %d %15s", fault->call, &fault->gpu,
							  &fault->delay_ms, &fault->result, fault->action) == 5) {
			fault_count++;
		}
	}
}

static int ask_kernel(void)
{
	char line[256] = "", loaded[80] = "";
	const char *release;
	FILE *file = fopen("/proc/driver/nvidia/version", "re");

	gpu_count = mig_count = fault_count = 0;
	if (!file)
		return DRIVER_NOT_LOADED;
	if (fgets(line, sizeof(line), file) && (release = strstr(line, "  ")))
		sscanf(release, "%79s", loaded);
	fclose(file);
	if (!reachable("/dev/nvidiactl", CONTROL_MINOR))
		return errno == ENOENT ? DRIVER_NOT_LOADED : UNKNOWN;
	if (strcmp(loaded, driver_version))
		return LIB_RM_VERSION_MISMATCH;
	find_gpus();
	return SUCCESS;
}

static void record(const char *call, int gpu)
{
	char line[160];
	int fd, length = snprintf(line, sizeof(line), "%d %s %d\n", (int)getpid(), call, gpu);

	/* One write in append mode: several processes may ask at once. */
	fd = calls_path[0] ? open(calls_path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
	if (fd >= 0) {
		if (write(fd, line, length) != length)
			perror(calls_path);
		close(fd);
	}
}

static void hang(void)
{
	sigset_t all;

	/* A driver call that hangs in the kernel takes no polite signal. */
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	for (;;)
		pause();
}

static int enter(const char *call, int gpu)
{
	record(call, gpu);
	for (unsigned i = 0; i < fault_count; i++) {
		struct fault *fault = &faults[i];
		struct timespec delay = {fault->delay_ms / 1000, fault->delay_ms % 1000 * 1000000L};

		if (strncmp(call, fault->call, strlen(fault->call)) || (fault->gpu >= 0 && fault->gpu != gpu))
			continue;
		while (nanosleep(&delay, &delay) && errno == EINTR)
			;
		if (strcmp(fault->action, "hang") == 0)
			hang();
		if (strcmp(fault->action, "crash") == 0) {
			signal(SIGSEGV, SIG_DFL);
			raise(SIGSEGV);
		}
		if (fault->result)
			return fault->result;
	}
	return SUCCESS;
}

/* Every call but the first: counted, perhaps made to fail, refused before nvmlInit. */
#define ENTER(gpu)                                                                                                     \
	do {                                                                                                           \
		int result_ = enter(__func__, gpu);                                                                    \
		if (!sessions)                                                                                         \
			return UNINITIALIZED;                                                                          \
		if (result_)                                                                                           \
			return result_;                                                                                \
	} while (0)

#define INDEX(gpu) ((gpu) >= gpus && (gpu) < gpus + gpu_count ? (int)((gpu) - gpus) : -1)

#define ENTER_GPU(gpu)                                                                                                 \
	do {                                                                                                           \
		ENTER(INDEX(gpu));                                                                                     \
		if (INDEX(gpu) < 0)                                                                                    \
			return INVALID_ARGUMENT;                                                                       \
	} while (0)

static int copy(char *to, unsigned size, const char *text)
{
	if (strlen(text) >= size)
		return INSUFFICIENT_SIZE;
	strcpy(to, text);
	return SUCCESS;
}

static int initialise(const char *call)
{
	char path[PATH_MAX];
	FILE *file = NULL;
	int result;

	if (!sessions) {
		own_folder(path, "nvml.conf");
		file = path[0] ? fopen(path, "re") : NULL;
		configured = file != NULL;
	}
	if (file) {
		load_configuration(file);
		fclose(file);
	}
	result = enter(call, -1);
	if (!result && !sessions && !configured)
		result = ask_kernel();
	if (!result)
		sessions++;
	return result;
}

int nvmlInit_v2(void)
{
	return initialise(__func__);
}

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return initialise(__func__);
}

int nvmlShutdown(void)
{
	ENTER(-1);
	sessions--;
	return SUCCESS;
}

const char *nvmlErrorString(int result)
{
	static const char *const texts[] = {
		"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
		"Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
		"Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
		"Corrupted infoROM", "GPU is lost", "GPU requires restart", "The operating system has blocked the request.",
		"Driver/library version mismatch",
	};

	return result >= 0 && result < (int)(sizeof(texts) / sizeof(*texts)) ? texts[result] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
	ENTER(-1);
	return copy(version, length, driver_version);
}

int nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
	ENTER(-1);
	return copy(version, length, nvml_version);
}

/* NVML answers this one without nvmlInit too, and so do the two versions of it here. */
int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	int result = enter(__func__, -1);

	if (!result)
		*version = cuda_version;
	return result;
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
	int result = enter(__func__, -1);

	if (!result)
		*version = cuda_version;
	return result;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	ENTER(-1);
	*count = gpu_count;
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **handle)
{
	ENTER((int)index);
	if (index >= gpu_count)
		return INVALID_ARGUMENT;
	*handle = &gpus[index];
	return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **handle)
{
	unsigned i = 0;

	while (i < gpu_count && strcasecmp(uuid, gpus[i].uuid))
		i++;
	ENTER(i < gpu_count ? (int)i : -1);
	if (i == gpu_count)
		return NOT_FOUND;
	*handle = &gpus[i];
	return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct gpu **handle)
{
	struct gpu wanted = {0};
	int parsed = sscanf(bus_id, "%x:%x:%x.%x", &wanted.domain, &wanted.bus, &wanted.device, &wanted.function) >= 3;
	unsigned i = 0;

	while (i < gpu_count && by_bus_id(&wanted, &gpus[i]))
		i++;
	ENTER(i < gpu_count ? (int)i : -1);
	if (!parsed)
		return INVALID_ARGUMENT;
	if (i == gpu_count)
		return NOT_FOUND;
	*handle = &gpus[i];
	return SUCCESS;
}

int nvmlDeviceGetIndex(struct gpu *gpu, unsigned *index)
{
	ENTER_GPU(gpu);
	*index = INDEX(gpu);
	return SUCCESS;
}

static struct mig *mig_of(void *handle)
{
	struct mig *mig = handle;

	return mig >= migs && mig < migs + mig_count ? mig : NULL;
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *uuid, unsigned length)
{
	struct mig *mig = mig_of(gpu);

	if (mig) {
		ENTER((int)mig->gpu);
		return copy(uuid, length, mig->uuid);
	}
	ENTER_GPU(gpu);
	return copy(uuid, length, gpu->uuid);
}

int nvmlDeviceGetName(struct gpu *gpu, char *name, unsigned length)
{
	struct mig *mig = mig_of(gpu);

	if (mig) {
		ENTER((int)mig->gpu);
		int wanted = snprintf(name, length, "%s MIG %s", gpus[mig->gpu].name, mig->profile);
		return wanted >= (int)length ? INSUFFICIENT_SIZE : SUCCESS;
	}
	ENTER_GPU(gpu);
	return copy(name, length, gpu->name);
}

int nvmlDeviceGetMinorNumber(struct gpu *gpu, unsigned *minor)
{
	ENTER_GPU(gpu);
	*minor = gpu->minor;
	return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct gpu *gpu, int *major, int *minor)
{
	ENTER_GPU(gpu);
	*major = gpu->compute_major;
	*minor = gpu->compute_minor;
	return SUCCESS;
}

int nvmlDeviceGetBrand(struct gpu *gpu, unsigned *brand)
{
	ENTER_GPU(gpu);
	*brand = gpu->brand;
	return SUCCESS;
}

int nvmlDeviceGetArchitecture(struct gpu *gpu, unsigned *architecture)
{
	ENTER_GPU(gpu);
	*architecture = gpu->architecture;
	return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(struct gpu *gpu, unsigned *mode)
{
	ENTER_GPU(gpu);
	*mode = 1;
	return SUCCESS;
}

int nvmlDeviceGetNumaNodeId(struct gpu *gpu, int *node)
{
	ENTER_GPU(gpu);
	*node = gpu->numa_node;
	return gpu->numa_node < 0 ? NOT_SUPPORTED : SUCCESS;
}

/* `mig` is the current and the pending mode; -1 where the GPU has none. */
int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending)
{
	ENTER_GPU(gpu);
	if (gpu->mig < 0)
		return NOT_SUPPORTED;
	*current = *pending = gpu->mig;
	return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count)
{
	ENTER_GPU(gpu);
	*count = gpu->mig > 0 ? 7 : 0;
	return SUCCESS;
}

/* The indexes of a GPU's MIG devices may have gaps in NVML; here they have none. */
int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct mig **handle)
{
	ENTER_GPU(gpu);
	for (unsigned i = 0; i < mig_count; i++) {
		if (migs[i].gpu != (unsigned)INDEX(gpu) || index-- > 0)
			continue;
		*handle = &migs[i];
		return SUCCESS;
	}
	return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(struct mig *mig, unsigned *id)
{
	ENTER(mig_of(mig) ? (int)mig->gpu : -1);
	if (!mig_of(mig))
		return INVALID_ARGUMENT;
	*id = mig->gi;
	return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(struct mig *mig, unsigned *id)
{
	ENTER(mig_of(mig) ? (int)mig->gpu : -1);
	if (!mig_of(mig))
		return INVALID_ARGUMENT;
	*id = mig->ci;
	return SUCCESS;
}

struct pci_info {
	char bus_id_legacy[16];
	unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_info *pci)
{
	ENTER_GPU(gpu);
	*pci = (struct pci_info){
		.domain = gpu->domain,
		.bus = gpu->bus,
		.device = gpu->device,
		.pci_device_id = gpu->device_id,
		.pci_subsystem_id = gpu->subsystem_id,
	};
	/* NVML writes the function as 0 and eight digits of domain, four in the legacy field. */
	snprintf(pci->bus_id_legacy, sizeof(pci->bus_id_legacy), "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
		 gpu->device & 0xff);
	snprintf(pci->bus_id, sizeof(pci->bus_id), "%08X:%02X:%02X.0", gpu->domain, gpu->bus & 0xff, gpu->device & 0xff);
	return SUCCESS;
}
