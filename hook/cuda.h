/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA driver-API check: opens libcuda, compiles two kernels from PTX on the device and runs them.
 *
 * The caller owns both structures and passes them in; nothing is allocated across this border, and strings
 * are always terminated. hook/_cuda_build.py reads the declarations from this file.
 */
#ifndef NVHOOK_CUDA_H
#define NVHOOK_CUDA_H

/* In the order in which they run. The first two happen once a process, the last once a pair of devices, the others
 * once a device. */
enum nv_step {
    NV_LOAD,     /* dlopen and the look-up of every function */
    NV_INIT,     /* cuInit, driver version, number of devices */
    NV_IDENTIFY, /* name, UUID, bus id, compute capability */
    NV_CONTEXT,  /* the device's primary context */
    NV_JIT,      /* PTX to machine code, by the driver's compiler */
    NV_ALLOC,    /* device memory */
    NV_COPY_IN,  /* host to device */
    NV_KERNEL,   /* the vector kernel, launch to end */
    NV_COPY_OUT, /* device to host */
    NV_CHECK,    /* every element compared with the CPU's */
    NV_HELLO,    /* the kernel that prints */
    NV_RELEASE,  /* memory, module and context given back */
    NV_PEER,     /* one device's memory to another's */
    NV_STEPS
};

enum { NV_CALL = 32, NV_NAME = 128, NV_TEXT = 512, NV_UUID = 48, NV_BUS_ID = 32, NV_LOG = 2048, NV_FAILURES = 8 };

/* One failing call. `code` is a CUresult; 0 where the failure is not CUDA's (dlopen, a wrong element). */
typedef struct {
    int step;
    int device; /* -1 before there is one */
    int code;
    char call[NV_CALL]; /* the CUDA function as the manual names it */
    char name[NV_NAME]; /* CUDA_ERROR_…; empty where code is 0 */
    char text[NV_TEXT];
} nv_failure;

typedef struct {
    int count; /* entries of `item` in use; one more would replace the last */
    nv_failure item[NV_FAILURES];
} nv_failures;

/* What is true of the whole process. */
typedef struct {
    char library[NV_TEXT]; /* what was asked of dlopen */
    int version;           /* CUDA version that this libcuda implements, 1000 * major + 10 * minor; 0 unknown */
    int devices;
    double ms[NV_STEPS]; /* milliseconds; negative: the step was not reached */
    nv_failures failures;
} nv_driver;

typedef struct {
    int ordinal; /* rank by PCI bus id among the visible devices */
    int major;   /* compute capability */
    int minor;
    char name[NV_NAME];
    char uuid[NV_UUID];     /* GPU-…, as nvidia-smi prints it */
    char bus_id[NV_BUS_ID]; /* domain:bus:device.function */
    unsigned int elements;  /* compared by the CPU and found right */
    char hello[NV_TEXT];    /* what the device printed */
    char log[NV_LOG];       /* the compiler's messages where it refused the PTX */
    double ms[NV_STEPS];
    nv_failures failures;
} nv_device;

/* A copy from one device's memory to another's. */
typedef struct {
    int from; /* ordinals */
    int to;
    int direct;            /* 1: `to` reads the memory of `from` itself; 0: the driver copies by way of the host's */
    unsigned int elements; /* compared by the CPU and found right */
    double bandwidth;      /* bytes a second over several copies; 0 before they were made */
    nv_failures failures;  /* of step NV_PEER, on `to` but for what is done on `from` */
} nv_peer;

/* A step's name, as printed and as the key in JSON. */
const char *nv_step_name(int step);

/*
 * Loads `library` (NULL: libcuda.so.1 as the loader finds it), initialises CUDA and counts the devices.
 * Sets CUDA_DEVICE_ORDER and CUDA_CACHE_DISABLE in this process. Returns 1 if all went well, else 0 with
 * the reason in driver->failures. No device is a failure: cuInit itself reports it.
 */
int nv_cuda_open(const char *library, nv_driver *driver);

/* After nv_cuda_open: what the device is, without a context. Returns 1, or 0 with device->failures. */
int nv_cuda_identify(int ordinal, nv_device *device);

/*
 * After nv_cuda_open: identifies the device, then runs both kernels on it. Returns 1 if every call
 * succeeded and every element is right. Standard output is a pipe of ours during NV_HELLO and is then put
 * back: the device's line lands in device->hello, never on the terminal by itself.
 */
int nv_cuda_run(int ordinal, nv_device *device);

/*
 * After nv_cuda_open: copies a pattern from the memory of one device to another's by cuMemcpyPeer, directly where
 * the driver allows it, times some more of the same, and compares every element. Returns 1 if every call succeeded and
 * every element is right. Takes 64 MiB on each device and twice that of the host, and gives them back.
 */
int nv_cuda_peer(int from, int to, nv_peer *peer);

#endif
