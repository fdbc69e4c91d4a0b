/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver API as nvhook uses it: part of the module hook._cuda and, with -DNV_STANDALONE, the
 * program `cuda-check [--device N] [--peer N N] [--json] [--library PATH]`.
 *
 * Nothing of CUDA is needed to build this: the prototypes below state the ABI of the few functions called,
 * and libcuda comes by dlopen, so that a machine without a driver gets a message instead of a loader error.
 */
#define _DEFAULT_SOURCE 1
#ifdef NV_STANDALONE
/* The checked variants of printf and friends are younger than the glibc that the program asks for. */
#undef _FORTIFY_SOURCE
#endif

#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Handles are pointers, a device is an int, device memory is a 64-bit number on every 64-bit system. */
typedef struct context *context_handle;
typedef struct module *module_handle;
typedef struct function *function_handle;
typedef uint64_t device_pointer;

/*
 * Name in the manual, name in the library, older name of the same signature, parameters. The manual's names
 * are macros for versioned symbols: the unversioned cuMemAlloc still exists and takes 32-bit sizes.
 * cuDeviceGetUuid_v2 came with CUDA 11.4, cuDevicePrimaryCtxRelease_v2 with 11.0.
 */
#define FUNCTIONS(F)                                                                                        \
    F(cuInit, "cuInit", NULL, (unsigned int flags))                                                         \
    F(cuDriverGetVersion, "cuDriverGetVersion", NULL, (int *version))                                       \
    F(cuGetErrorName, "cuGetErrorName", NULL, (int code, const char **name))                                \
    F(cuGetErrorString, "cuGetErrorString", NULL, (int code, const char **text))                            \
    F(cuDeviceGetCount, "cuDeviceGetCount", NULL, (int *count))                                             \
    F(cuDeviceGet, "cuDeviceGet", NULL, (int *device, int ordinal))                                         \
    F(cuDeviceGetName, "cuDeviceGetName", NULL, (char *name, int size, int device))                         \
    F(cuDeviceGetUuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid", (unsigned char *uuid, int device))          \
    F(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", NULL, (char *bus_id, int size, int device))               \
    F(cuDeviceGetAttribute, "cuDeviceGetAttribute", NULL, (int *value, int attribute, int device))          \
    F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", NULL, (context_handle *context, int device))    \
    F(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", (int device)) \
    F(cuCtxSetCurrent, "cuCtxSetCurrent", NULL, (context_handle context))                                   \
    F(cuCtxSynchronize, "cuCtxSynchronize", NULL, (void))                                                   \
    F(cuModuleLoadDataEx, "cuModuleLoadDataEx", NULL,                                                       \
      (module_handle *module, const void *image, unsigned int count, int *options, void **values))          \
    F(cuModuleGetFunction, "cuModuleGetFunction", NULL,                                                     \
      (function_handle *function, module_handle module, const char *name))                                  \
    F(cuModuleUnload, "cuModuleUnload", NULL, (module_handle module))                                       \
    F(cuMemAlloc, "cuMemAlloc_v2", NULL, (device_pointer *pointer, size_t size))                            \
    F(cuMemFree, "cuMemFree_v2", NULL, (device_pointer pointer))                                            \
    F(cuMemcpyHtoD, "cuMemcpyHtoD_v2", NULL, (device_pointer to, const void *from, size_t size))            \
    F(cuMemcpyDtoH, "cuMemcpyDtoH_v2", NULL, (void *to, device_pointer from, size_t size))                  \
    F(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", NULL, (int *can, int device, int peer))               \
    F(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", NULL, (context_handle peer, unsigned int flags))      \
    F(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", NULL, (context_handle peer))                        \
    F(cuMemcpyPeer, "cuMemcpyPeer", NULL,                                                                   \
      (device_pointer to, context_handle to_context, device_pointer from, context_handle from_context,      \
       size_t size))                                                                                        \
    F(cuLaunchKernel, "cuLaunchKernel", NULL,                                                               \
      (function_handle function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,             \
       unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,         \
       void *stream, void **parameters, void **extra))

/* Every function returns a CUresult: an int, 0 for success. */
#define POINTER(name, symbol, older, parameters) int(*name) parameters;
static struct {
    FUNCTIONS(POINTER)
} cuda;

enum { ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };            /* CUdevice_attribute */
enum { JIT_ERROR_LOG_BUFFER = 5, JIT_ERROR_LOG_BUFFER_SIZE = 6 }; /* CUjit_option */

/*
 * ELEMENTS is prime: no block size divides it, so the last block has an uneven tail. Past the end of the
 * result lie GUARD elements that the kernel must leave alone.
 *
 * Each value is a multiple of 1/4 below 2^22, which a float holds exactly. So is each product and sum:
 * nothing is rounded, fused or not, and the comparison with the CPU is for equality.
 */
enum { ELEMENTS = 1000003, GUARD = 64, BLOCK = 256, UNWRITTEN = 0xff };
static const float slope = 2.5f;
static const float quarter = 0.25f;

#define HELLO "Hello from GPU thread 0!\n"

/*
 * Written by hand, for PTX ISA 6.0 (CUDA 9) and compute capability 5.0 (Maxwell). A driver compiles such
 * text for every younger GPU: PTX is forward compatible, machine code is not. CUDA 13 drops the GPUs older
 * than 7.5, not the PTX written for them.
 *
 * PTX has no string literals. The bytes are "Hello from GPU thread %u!\n"; the number printed is the
 * thread's own index, read on the device. vprintf is the driver's: it takes the text and the address of the
 * packed arguments, both as generic addresses.
 */
static const char ptx[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    "\n"
    ".extern .func (.param .b32 written) vprintf (.param .b64 text, .param .b64 arguments);\n"
    "\n"
    ".global .align 1 .b8 greeting[27] = {\n"
    "    72, 101, 108, 108, 111, 32, 102, 114, 111, 109, 32, 71, 80, 85, 32,\n"
    "    116, 104, 114, 101, 97, 100, 32, 37, 117, 33, 10, 0};\n"
    "\n"
    ".visible .entry nvhook_line(.param .u64 p_out, .param .u64 p_x, .param .u64 p_b,\n"
    "                            .param .f32 p_slope, .param .u32 p_count)\n"
    "{\n"
    "    .reg .pred %past_end;\n"
    "    .reg .b32 %block, %width, %thread, %i, %count;\n"
    "    .reg .b64 %out, %x, %b, %offset;\n"
    "    .reg .f32 %slope, %x_i, %b_i, %y_i;\n"
    "\n"
    "    mov.u32 %block, %ctaid.x;\n"
    "    mov.u32 %width, %ntid.x;\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    mad.lo.u32 %i, %block, %width, %thread;\n"
    "    ld.param.u32 %count, [p_count];\n"
    "    setp.ge.u32 %past_end, %i, %count;\n"
    "    @%past_end bra end;\n"
    "\n"
    "    mul.wide.u32 %offset, %i, 4;\n"
    "    ld.param.u64 %x, [p_x];\n"
    "    cvta.to.global.u64 %x, %x;\n"
    "    add.u64 %x, %x, %offset;\n"
    "    ld.global.f32 %x_i, [%x];\n"
    "    ld.param.u64 %b, [p_b];\n"
    "    cvta.to.global.u64 %b, %b;\n"
    "    add.u64 %b, %b, %offset;\n"
    "    ld.global.f32 %b_i, [%b];\n"
    "    ld.param.f32 %slope, [p_slope];\n"
    "    fma.rn.f32 %y_i, %slope, %x_i, %b_i;\n"
    "    ld.param.u64 %out, [p_out];\n"
    "    cvta.to.global.u64 %out, %out;\n"
    "    add.u64 %out, %out, %offset;\n"
    "    st.global.f32 [%out], %y_i;\n"
    "end:\n"
    "    ret;\n"
    "}\n"
    "\n"
    ".visible .entry nvhook_hello()\n"
    "{\n"
    "    .local .align 8 .b8 packed[8];\n"
    "    .reg .b32 %thread, %printed;\n"
    "    .reg .b64 %text, %arguments;\n"
    "\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    st.local.u32 [packed], %thread;\n"
    "    mov.u64 %text, greeting;\n"
    "    cvta.global.u64 %text, %text;\n"
    "    mov.u64 %arguments, packed;\n"
    "    cvta.local.u64 %arguments, %arguments;\n"
    "    {\n"
    "        .param .b64 first;\n"
    "        .param .b64 second;\n"
    "        .param .b32 result;\n"
    "        st.param.b64 [first], %text;\n"
    "        st.param.b64 [second], %arguments;\n"
    "        call.uni (result), vprintf, (first, second);\n"
    "        ld.param.b32 %printed, [result];\n"
    "    }\n"
    "    ret;\n"
    "}\n";

/* What one device's run holds; but for `handle`, zero is "not there yet". */
typedef struct {
    int handle; /* what the driver calls the device */
    context_handle context;
    module_handle module;
    function_handle line;
    function_handle hello;
    device_pointer device_x, device_b, device_out;
    float *x, *b, *out;
} run_state;

static const char *const step_names[NV_STEPS] = {
    [NV_LOAD] = "load",         [NV_INIT] = "init",   [NV_IDENTIFY] = "identify", [NV_CONTEXT] = "context",
    [NV_JIT] = "jit",           [NV_ALLOC] = "alloc", [NV_COPY_IN] = "copy_in",   [NV_KERNEL] = "kernel",
    [NV_COPY_OUT] = "copy_out", [NV_CHECK] = "check", [NV_HELLO] = "hello",
    [NV_RELEASE] = "release",   [NV_PEER] = "peer",
};

const char *nv_step_name(int step)
{
    return step >= 0 && step < NV_STEPS ? step_names[step] : "?";
}

static double milliseconds(void)
{
    struct timespec time;

    /* The bare system call: glibc moved its wrapper between libraries, and its version is 2.17. */
    if (syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time) != 0)
        return 0;
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void copy_text(char *to, size_t size, const char *text)
{
    snprintf(to, size, "%s", text ? text : "");
}

static nv_failure *add_failure(nv_failures *failures, int step, int device, const char *call, const char *text)
{
    nv_failure *failure;

    if (failures->count < NV_FAILURES)
        failures->count++;
    failure = &failures->item[failures->count - 1];
    memset(failure, 0, sizeof *failure);
    failure->step = step;
    failure->device = device;
    copy_text(failure->call, sizeof failure->call, call);
    copy_text(failure->text, sizeof failure->text, text);
    return failure;
}

/* A failure that CUDA has no code for. Returns 0, so that a caller can return its value. */
static int fail(nv_failures *failures, int step, int device, const char *call, const char *text)
{
    add_failure(failures, step, device, call, text);
    return 0;
}

/* Whether a CUDA call succeeded; if not, its name, code and CUDA's own words are written down. */
static int succeeded(nv_failures *failures, int step, int device, const char *call, int code)
{
    const char *name = NULL, *text = NULL;
    nv_failure *failure;

    if (code == 0)
        return 1;
    /* Both fail for a code that this libcuda doesn't know, and then leave or clear the pointer. */
    cuda.cuGetErrorName(code, &name);
    cuda.cuGetErrorString(code, &text);
    failure = add_failure(failures, step, device, call, text ? text : "the driver has no text for this code");
    failure->code = code;
    copy_text(failure->name, sizeof failure->name, name ? name : "error");
    return 0;
}

#define TRY(device, step, function, arguments) \
    succeeded(&(device)->failures, step, (device)->ordinal, #function, cuda.function arguments)
#define TRY_DRIVER(driver, step, function, arguments) \
    succeeded(&(driver)->failures, step, -1, #function, cuda.function arguments)

static void *find(void *library, const char *symbol, const char *older)
{
    void *address = dlsym(library, symbol);

    return address || !older ? address : dlsym(library, older);
}

static int load(nv_driver *driver, const char *path)
{
    /* Never closed: libcuda starts threads and registers handlers that outlive any call of ours. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (!library)
        return fail(&driver->failures, NV_LOAD, -1, "dlopen", dlerror());
/* POSIX lets dlsym's object pointer be stored into a function pointer this way; ISO C has no cast for it. */
#define FIND(name, symbol, older, parameters)            \
    *(void **)&cuda.name = find(library, symbol, older); \
    if (!cuda.name)                                      \
        return fail(&driver->failures, NV_LOAD, -1, #name, "this library has no such function");
    FUNCTIONS(FIND)
    return 1;
}

static int init(nv_driver *driver)
{
    /*
     * By bus id, so that an index means the same GPU as in nvidia-smi and in nvhook's inventory; the default
     * is fastest first. Without the cache, so that the compiler really runs and no file is left at home.
     */
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    setenv("CUDA_CACHE_DISABLE", "1", 1);
    /* Works before cuInit, and is worth knowing when cuInit says that module and library don't match. */
    if (!TRY_DRIVER(driver, NV_INIT, cuDriverGetVersion, (&driver->version)))
        return 0;
    if (!TRY_DRIVER(driver, NV_INIT, cuInit, (0)) ||
        !TRY_DRIVER(driver, NV_INIT, cuDeviceGetCount, (&driver->devices)))
        return 0;
    if (driver->devices < 1)
        return fail(&driver->failures, NV_INIT, -1, "cuDeviceGetCount", "the driver shows no device");
    return 1;
}

static void no_times(double *times)
{
    for (int step = 0; step < NV_STEPS; step++)
        times[step] = -1;
}

int nv_cuda_open(const char *library, nv_driver *driver)
{
    const char *path = library ? library : "libcuda.so.1";
    double start = milliseconds();
    int good;

    memset(driver, 0, sizeof *driver);
    no_times(driver->ms);
    copy_text(driver->library, sizeof driver->library, path);
    good = load(driver, path);
    driver->ms[NV_LOAD] = milliseconds() - start;
    if (!good)
        return 0;
    start = milliseconds();
    good = init(driver);
    driver->ms[NV_INIT] = milliseconds() - start;
    return good;
}

static void write_uuid(char *to, size_t size, const unsigned char *bytes)
{
    size_t length = (size_t)snprintf(to, size, "GPU-");

    for (int i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        length += (size_t)snprintf(to + length, size - length, "%s%02x", dash, bytes[i]);
    }
}

static int identify(nv_device *device, int *handle)
{
    unsigned char uuid[16];

    if (!TRY(device, NV_IDENTIFY, cuDeviceGet, (handle, device->ordinal)) ||
        !TRY(device, NV_IDENTIFY, cuDeviceGetName, (device->name, NV_NAME, *handle)) ||
        !TRY(device, NV_IDENTIFY, cuDeviceGetUuid, (uuid, *handle)) ||
        !TRY(device, NV_IDENTIFY, cuDeviceGetPCIBusId, (device->bus_id, NV_BUS_ID, *handle)) ||
        !TRY(device, NV_IDENTIFY, cuDeviceGetAttribute, (&device->major, ATTRIBUTE_MAJOR, *handle)) ||
        !TRY(device, NV_IDENTIFY, cuDeviceGetAttribute, (&device->minor, ATTRIBUTE_MINOR, *handle)))
        return 0;
    write_uuid(device->uuid, sizeof device->uuid, uuid);
    return 1;
}

/* Fills `device` from nothing. */
static int start_device(int ordinal, nv_device *device, int *handle)
{
    double start = milliseconds();
    int good;

    memset(device, 0, sizeof *device);
    no_times(device->ms);
    device->ordinal = ordinal;
    good = identify(device, handle);
    device->ms[NV_IDENTIFY] = milliseconds() - start;
    return good;
}

int nv_cuda_identify(int ordinal, nv_device *device)
{
    int handle;

    return start_device(ordinal, device, &handle);
}

static int make_context(nv_device *device, run_state *run)
{
    return TRY(device, NV_CONTEXT, cuDevicePrimaryCtxRetain, (&run->context, run->handle)) &&
           TRY(device, NV_CONTEXT, cuCtxSetCurrent, (run->context));
}

static int compile_kernels(nv_device *device, run_state *run)
{
    int options[] = {JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE};
    void *values[] = {device->log, (void *)(uintptr_t)(NV_LOG - 1)};

    return TRY(device, NV_JIT, cuModuleLoadDataEx, (&run->module, ptx, 2, options, values)) &&
           TRY(device, NV_JIT, cuModuleGetFunction, (&run->line, run->module, "nvhook_line")) &&
           TRY(device, NV_JIT, cuModuleGetFunction, (&run->hello, run->module, "nvhook_hello"));
}

/* The host's side. No step of its own: its time says nothing of the GPU. */
static int prepare(nv_device *device, run_state *run)
{
    size_t size = ELEMENTS * sizeof(float), guarded = (ELEMENTS + GUARD) * sizeof(float);

    run->x = malloc(size);
    run->b = malloc(size);
    run->out = malloc(guarded);
    if (!run->x || !run->b || !run->out)
        return fail(&device->failures, NV_ALLOC, device->ordinal, "malloc", strerror(errno));
    for (int i = 0; i < ELEMENTS; i++) {
        run->x[i] = (float)i;
        run->b[i] = (float)(i % 1024) * quarter;
    }
    /* All ones is no number, so an element that the kernel never wrote can't pass for a result. */
    memset(run->out, UNWRITTEN, guarded);
    return 1;
}

static int allocate(nv_device *device, run_state *run)
{
    size_t size = ELEMENTS * sizeof(float), guarded = (ELEMENTS + GUARD) * sizeof(float);

    return TRY(device, NV_ALLOC, cuMemAlloc, (&run->device_x, size)) &&
           TRY(device, NV_ALLOC, cuMemAlloc, (&run->device_b, size)) &&
           TRY(device, NV_ALLOC, cuMemAlloc, (&run->device_out, guarded));
}

static int copy_in(nv_device *device, run_state *run)
{
    size_t size = ELEMENTS * sizeof(float), guarded = (ELEMENTS + GUARD) * sizeof(float);

    return TRY(device, NV_COPY_IN, cuMemcpyHtoD, (run->device_x, run->x, size)) &&
           TRY(device, NV_COPY_IN, cuMemcpyHtoD, (run->device_b, run->b, size)) &&
           TRY(device, NV_COPY_IN, cuMemcpyHtoD, (run->device_out, run->out, guarded));
}

static int run_line(nv_device *device, run_state *run)
{
    float a = slope;
    uint32_t count = ELEMENTS;
    void *parameters[] = {&run->device_out, &run->device_x, &run->device_b, &a, &count};
    unsigned int blocks = (ELEMENTS + BLOCK - 1) / BLOCK;

    return TRY(device, NV_KERNEL, cuLaunchKernel,
               (run->line, blocks, 1, 1, BLOCK, 1, 1, 0, NULL, parameters, NULL)) &&
           TRY(device, NV_KERNEL, cuCtxSynchronize, ());
}

static int copy_out(nv_device *device, run_state *run)
{
    size_t guarded = (ELEMENTS + GUARD) * sizeof(float);

    /* Cleared first: a copy that does nothing must not leave what the check expects. */
    memset(run->out, 0, guarded);
    return TRY(device, NV_COPY_OUT, cuMemcpyDtoH, (run->out, run->device_out, guarded));
}

static int check_elements(nv_device *device, run_state *run)
{
    unsigned int wrong = 0, first = 0;
    char text[NV_TEXT];

    for (unsigned int i = 0; i < ELEMENTS; i++) {
        if (run->out[i] == slope * (float)i + (float)(i % 1024) * quarter)
            continue;
        if (wrong++ == 0)
            first = i;
    }
    device->elements = ELEMENTS - wrong;
    if (wrong == 0)
        return 1;
    snprintf(text, sizeof text, "%u of %d elements are wrong; the first, %u, is %.9g and should be %.9g", wrong,
             ELEMENTS, first, (double)run->out[first],
             (double)(slope * (float)first + (float)(first % 1024) * quarter));
    return fail(&device->failures, NV_CHECK, device->ordinal, "nvhook_line", text);
}

static int check_guard(nv_device *device, run_state *run)
{
    const unsigned char *guard = (const unsigned char *)&run->out[ELEMENTS];
    char text[NV_TEXT];

    for (size_t i = 0; i < GUARD * sizeof(float); i++) {
        if (guard[i] == UNWRITTEN)
            continue;
        snprintf(text, sizeof text, "byte %zu past the last element was overwritten", i);
        return fail(&device->failures, NV_CHECK, device->ordinal, "nvhook_line", text);
    }
    return 1;
}

static int check(nv_device *device, run_state *run)
{
    int right = check_elements(device, run);

    return check_guard(device, run) && right;
}

/* Reads to the end or until the text is full. */
static void read_text(int from, char *text, size_t size)
{
    size_t length = 0;
    ssize_t got;

    while (length < size - 1) {
        got = read(from, text + length, size - 1 - length);
        if (got == 0 || (got < 0 && errno != EINTR))
            break;
        length += got > 0 ? (size_t)got : 0;
    }
    text[length] = 0;
}

static int launch_hello(nv_device *device, run_state *run)
{
    return TRY(device, NV_HELLO, cuLaunchKernel, (run->hello, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)) &&
           TRY(device, NV_HELLO, cuCtxSynchronize, ());
}

/*
 * The driver keeps what a kernel prints in a buffer on the device and writes it to standard output when the
 * context is synchronised, through the C library's buffer. So that buffer is flushed before and after, and
 * descriptor 1 is a pipe in between: only what came back from the device is taken for its greeting.
 */
static int greet(nv_device *device, run_state *run)
{
    int pair[2], saved, good;
    char text[NV_TEXT];

    fflush(stdout);
    saved = dup(STDOUT_FILENO);
    if (saved < 0)
        return fail(&device->failures, NV_HELLO, device->ordinal, "dup(stdout)", strerror(errno));
    if (pipe(pair) < 0) {
        close(saved);
        return fail(&device->failures, NV_HELLO, device->ordinal, "pipe", strerror(errno));
    }
    dup2(pair[1], STDOUT_FILENO);
    close(pair[1]);
    good = launch_hello(device, run);
    fflush(stdout);
    /* Closes the last writing end, so the reading below ends. */
    dup2(saved, STDOUT_FILENO);
    close(saved);
    read_text(pair[0], device->hello, sizeof device->hello);
    close(pair[0]);
    if (good && strcmp(device->hello, HELLO) != 0) {
        snprintf(text, sizeof text, "the device printed '%.200s'", device->hello);
        return fail(&device->failures, NV_HELLO, device->ordinal, "vprintf", text);
    }
    return good;
}

/*
 * Gives everything back, as far as it is there. After a failure nothing more is reported: an error of a
 * kernel sticks to the context, and each of these calls would only say it again.
 */
static int release(nv_device *device, run_state *run)
{
    nv_device unreported = {0};
    nv_device *reported = device->failures.count ? &unreported : device;
    device_pointer memory[] = {run->device_x, run->device_b, run->device_out};
    int good = 1;

    free(run->x);
    free(run->b);
    free(run->out);
    for (int i = 0; i < 3; i++)
        if (memory[i])
            good &= TRY(reported, NV_RELEASE, cuMemFree, (memory[i]));
    if (run->module)
        good &= TRY(reported, NV_RELEASE, cuModuleUnload, (run->module));
    if (run->context) {
        good &= TRY(reported, NV_RELEASE, cuCtxSetCurrent, (NULL));
        good &= TRY(reported, NV_RELEASE, cuDevicePrimaryCtxRelease, (run->handle));
    }
    return good;
}

static int timed(nv_device *device, run_state *run, enum nv_step step)
{
    static int (*const steps[NV_STEPS])(nv_device *, run_state *) = {
        [NV_CONTEXT] = make_context, [NV_JIT] = compile_kernels, [NV_ALLOC] = allocate, [NV_COPY_IN] = copy_in,
        [NV_KERNEL] = run_line,      [NV_COPY_OUT] = copy_out,   [NV_CHECK] = check,    [NV_HELLO] = greet,
        [NV_RELEASE] = release,
    };
    double start = milliseconds();
    int good = steps[step](device, run);

    device->ms[step] = milliseconds() - start;
    return good;
}

/* Up to the first step that fails. Wrong elements don't stop the greeting, which is a question of its own. */
static void run_steps(nv_device *device, run_state *run)
{
    for (enum nv_step step = NV_CONTEXT; step < NV_RELEASE; step++)
        if (!timed(device, run, step) && step != NV_CHECK)
            break;
}

int nv_cuda_run(int ordinal, nv_device *device)
{
    run_state run = {0};

    if (!start_device(ordinal, device, &run.handle))
        return 0;
    if (prepare(device, &run))
        run_steps(device, &run);
    timed(device, &run, NV_RELEASE);
    return device->failures.count == 0;
}

/*
 * A copy between two devices. Large enough that starting a copy does not count: 64 MiB take 0.15 ms over the fastest
 * link, and the bandwidth is that of COPIES in a row.
 */
enum { PEER_ELEMENTS = 1 << 24, COPIES = 20, PEER_ACCESS_ALREADY_ENABLED = 704 };

/* What one copy holds; zero is "not there yet". [0] is the device copied from, [1] the one copied to. */
typedef struct {
    int handle[2];
    context_handle context[2];
    device_pointer memory[2];
    uint32_t *pattern, *out;
    int enabled;
} peer_state;

#define TRY_PEER(peer, side, function, arguments) \
    succeeded(&(peer)->failures, NV_PEER, (side) ? (peer)->to : (peer)->from, #function, cuda.function arguments)

static int peer_memory(nv_peer *peer, peer_state *run, int side)
{
    int ordinal = side ? peer->to : peer->from;

    return TRY_PEER(peer, side, cuDeviceGet, (&run->handle[side], ordinal)) &&
           TRY_PEER(peer, side, cuDevicePrimaryCtxRetain, (&run->context[side], run->handle[side])) &&
           TRY_PEER(peer, side, cuCtxSetCurrent, (run->context[side])) &&
           TRY_PEER(peer, side, cuMemAlloc, (&run->memory[side], PEER_ELEMENTS * sizeof(uint32_t)));
}

/* Every element differs from its neighbours and, for these 2^24, from each other: odd factors are invertible. */
static uint32_t pattern_at(uint32_t i, int from)
{
    return (i + 1) * 2654435761u ^ (uint32_t)from << 28;
}

static int peer_fill(nv_peer *peer, peer_state *run)
{
    size_t size = PEER_ELEMENTS * sizeof(uint32_t);

    run->pattern = malloc(size);
    run->out = malloc(size);
    if (!run->pattern || !run->out)
        return fail(&peer->failures, NV_PEER, peer->to, "malloc", strerror(errno));
    for (uint32_t i = 0; i < PEER_ELEMENTS; i++)
        run->pattern[i] = pattern_at(i, peer->from);
    /* What is never copied stays the pattern's complement, which is wrong at every element. */
    for (uint32_t i = 0; i < PEER_ELEMENTS; i++)
        run->out[i] = ~run->pattern[i];
    return TRY_PEER(peer, 1, cuMemcpyHtoD, (run->memory[1], run->out, size)) &&
           TRY_PEER(peer, 0, cuCtxSetCurrent, (run->context[0])) &&
           TRY_PEER(peer, 0, cuMemcpyHtoD, (run->memory[0], run->pattern, size));
}

/*
 * Without peer access the driver goes through the host's memory, which is as right and slower. It may be on already: a
 * primary context is the process's, not ours. The context of `to` is left current.
 */
static int peer_access(nv_peer *peer, peer_state *run)
{
    int code;

    if (!TRY_PEER(peer, 1, cuCtxSetCurrent, (run->context[1])) ||
        !TRY_PEER(peer, 1, cuDeviceCanAccessPeer, (&peer->direct, run->handle[1], run->handle[0])))
        return 0;
    if (!peer->direct)
        return 1;
    code = cuda.cuCtxEnablePeerAccess(run->context[0], 0);
    run->enabled = code == 0;
    return code == PEER_ACCESS_ALREADY_ENABLED ||
           succeeded(&peer->failures, NV_PEER, peer->to, "cuCtxEnablePeerAccess", code);
}

/* cuMemcpyPeer does not wait for the host, only for the work of both contexts. */
static int peer_copies(nv_peer *peer, peer_state *run, int count)
{
    size_t size = PEER_ELEMENTS * sizeof(uint32_t);

    for (int i = 0; i < count; i++)
        if (!TRY_PEER(peer, 1, cuMemcpyPeer,
                      (run->memory[1], run->context[1], run->memory[0], run->context[0], size)))
            return 0;
    return TRY_PEER(peer, 1, cuCtxSynchronize, ());
}

static int peer_timed(nv_peer *peer, peer_state *run)
{
    double start, seconds;

    /* The first copy sets up what later ones use. */
    if (!peer_copies(peer, run, 1))
        return 0;
    start = milliseconds();
    if (!peer_copies(peer, run, COPIES))
        return 0;
    seconds = (milliseconds() - start) / 1e3;
    if (seconds > 0)
        peer->bandwidth = (double)COPIES * PEER_ELEMENTS * sizeof(uint32_t) / seconds;
    return 1;
}

static int peer_check(nv_peer *peer, peer_state *run)
{
    size_t size = PEER_ELEMENTS * sizeof(uint32_t);
    unsigned int wrong = 0, first = 0;
    char text[NV_TEXT];

    memset(run->out, 0, size);
    if (!TRY_PEER(peer, 1, cuMemcpyDtoH, (run->out, run->memory[1], size)))
        return 0;
    for (unsigned int i = 0; i < PEER_ELEMENTS; i++)
        if (run->out[i] != pattern_at(i, peer->from) && wrong++ == 0)
            first = i;
    peer->elements = PEER_ELEMENTS - wrong;
    if (wrong == 0)
        return 1;
    snprintf(text, sizeof text, "%u of %d elements are wrong; the first, %u, is %#x and should be %#x", wrong,
             PEER_ELEMENTS, first, run->out[first], pattern_at(first, peer->from));
    return fail(&peer->failures, NV_PEER, peer->to, "cuMemcpyPeer", text);
}

/* As `release`: after a failure nothing more is reported. */
static void peer_release(nv_peer *peer, peer_state *run)
{
    nv_peer unreported = *peer;
    nv_peer *reported = peer->failures.count ? &unreported : peer;

    free(run->pattern);
    free(run->out);
    if (run->enabled)
        TRY_PEER(reported, 1, cuCtxDisablePeerAccess, (run->context[0]));
    for (int side = 1; side >= 0; side--) {
        if (!run->context[side])
            continue;
        TRY_PEER(reported, side, cuCtxSetCurrent, (run->context[side]));
        if (run->memory[side])
            TRY_PEER(reported, side, cuMemFree, (run->memory[side]));
        TRY_PEER(reported, side, cuCtxSetCurrent, (NULL));
        TRY_PEER(reported, side, cuDevicePrimaryCtxRelease, (run->handle[side]));
    }
}

int nv_cuda_peer(int from, int to, nv_peer *peer)
{
    peer_state run = {0};

    memset(peer, 0, sizeof *peer);
    peer->from = from;
    peer->to = to;
    if (peer_memory(peer, &run, 0) && peer_memory(peer, &run, 1) && peer_fill(peer, &run) &&
        peer_access(peer, &run) && peer_timed(peer, &run))
        peer_check(peer, &run);
    peer_release(peer, &run);
    return peer->failures.count == 0;
}

#ifdef NV_STANDALONE

#if defined(__x86_64__) && defined(__GLIBC__)
/*
 * The program runs in images with a glibc older than the one it was linked with. Versions by which a symbol
 * was known before it moved or changed: dlopen and friends went from libdl to libc in 2.34, memcpy stopped
 * allowing overlaps in 2.14, and the start files of 2.34 ask for a __libc_start_main of that version.
 *
 * Hence -nostartfiles and a start of our own, after the x86-64 ABI: argc lies at the stack pointer, argv
 * above it, rdx holds the loader's exit handler. The init and fini parameters stay empty: this program has no
 * constructors.
 */
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5\n"
        ".symver dlsym, dlsym@GLIBC_2.2.5\n"
        ".symver dlerror, dlerror@GLIBC_2.2.5\n"
        ".symver memcpy, memcpy@GLIBC_2.2.5\n"
        ".symver __libc_start_main, __libc_start_main@GLIBC_2.2.5\n"
        ".text\n"
        ".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "    xorl %ebp, %ebp\n"
        "    movq %rdx, %r9\n"
        "    popq %rsi\n"
        "    movq %rsp, %rdx\n"
        "    andq $-16, %rsp\n"
        "    pushq %rax\n"
        "    pushq %rsp\n"
        "    xorl %r8d, %r8d\n"
        "    xorl %ecx, %ecx\n"
        "    leaq main(%rip), %rdi\n"
        "    call *__libc_start_main@GOTPCREL(%rip)\n"
        "    hlt\n"
        ".size _start, . - _start\n");
#endif

typedef struct {
    const char *library;
    int device;  /* -1: all */
    int peer[2]; /* -1: none */
    int json;
} arguments;

static void print_json_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte == '"' || byte == '\\')
            printf("\\%c", byte);
        else if (byte < ' ')
            printf("\\u%04x", byte);
        else
            putchar(byte);
    }
    putchar('"');
}

static void print_json_member(const char *key, const char *value)
{
    printf("\"%s\": ", key);
    print_json_string(value);
    printf(", ");
}

static void print_json_version(int version)
{
    if (version)
        printf("\"cuda\": \"%d.%d\", ", version / 1000, version % 1000 / 10);
    else
        printf("\"cuda\": null, ");
}

static void print_json_times(const double *times)
{
    const char *comma = "";

    printf("\"ms\": {");
    for (int step = 0; step < NV_STEPS; step++) {
        if (times[step] < 0)
            continue;
        printf("%s\"%s\": %.3f", comma, nv_step_name(step), times[step]);
        comma = ", ";
    }
    printf("}, ");
}

static void print_json_failures(const nv_failures *failures)
{
    printf("\"failures\": [");
    for (int i = 0; i < failures->count; i++) {
        const nv_failure *failure = &failures->item[i];
        printf("%s{", i ? ", " : "");
        print_json_member("step", nv_step_name(failure->step));
        if (failure->device >= 0)
            printf("\"device\": %d, ", failure->device);
        else
            printf("\"device\": null, ");
        print_json_member("call", failure->call);
        printf("\"code\": %d, ", failure->code);
        print_json_member("name", failure->name);
        printf("\"text\": ");
        print_json_string(failure->text);
        printf("}");
    }
    printf("]");
}

static void print_json_device(const nv_device *device)
{
    printf("{\"index\": %d, ", device->ordinal);
    print_json_member("name", device->name);
    print_json_member("uuid", device->uuid);
    print_json_member("bus_id", device->bus_id);
    printf("\"capability\": \"%d.%d\", \"elements\": %u, ", device->major, device->minor, device->elements);
    print_json_member("hello", device->hello);
    print_json_member("log", device->log);
    print_json_times(device->ms);
    print_json_failures(&device->failures);
    printf("}");
}

static void print_failures(const nv_failures *failures)
{
    /* The report comes first also where the two streams end in one file. */
    fflush(stdout);
    for (int i = 0; i < failures->count; i++) {
        const nv_failure *failure = &failures->item[i];
        fprintf(stderr, "cuda-check: error: ");
        if (failure->device >= 0)
            fprintf(stderr, "device %d, ", failure->device);
        fprintf(stderr, "step %s: %s: ", nv_step_name(failure->step), failure->call);
        if (failure->code)
            fprintf(stderr, "%s (%d): ", failure->name, failure->code);
        fprintf(stderr, "%s\n", failure->text);
    }
}

static void print_times(const double *times)
{
    const char *comma = "";

    for (int step = 0; step < NV_STEPS; step++) {
        if (times[step] < 0)
            continue;
        printf("%s%s %.3f", comma, nv_step_name(step), times[step]);
        comma = ", ";
    }
    printf(" ms\n");
}

static void print_driver(const nv_driver *driver)
{
    if (driver->failures.count) {
        print_failures(&driver->failures);
        return;
    }
    printf("%s: CUDA %d.%d, devices: %d\n  ", driver->library, driver->version / 1000,
           driver->version % 1000 / 10, driver->devices);
    print_times(driver->ms);
}

static void print_device(const nv_device *device)
{
    /* The UUID is the last thing that is found out. */
    if (!device->uuid[0]) {
        print_failures(&device->failures);
        return;
    }
    printf("device %d: %s, %s, %s, compute capability %d.%d\n  ", device->ordinal, device->name, device->uuid,
           device->bus_id, device->major, device->minor);
    print_times(device->ms);
    if (device->ms[NV_CHECK] >= 0)
        printf("  vector kernel: %u elements right\n", device->elements);
    if (!strcmp(device->hello, HELLO))
        printf("%s", device->hello);
    print_failures(&device->failures);
    if (device->log[0])
        fprintf(stderr, "%s\n", device->log);
}

static int run_device(int ordinal, int json)
{
    nv_device device;
    int good = nv_cuda_run(ordinal, &device);

    if (json)
        print_json_device(&device);
    else
        print_device(&device);
    return good;
}

static void print_json_peer(const nv_peer *peer)
{
    printf("{\"from\": %d, \"to\": %d, \"direct\": %s, ", peer->from, peer->to, peer->direct ? "true" : "false");
    printf("\"elements\": %u, \"bandwidth\": %.0f, ", peer->elements, peer->bandwidth);
    print_json_failures(&peer->failures);
    printf("}");
}

static void print_peer(const nv_peer *peer)
{
    if (peer->elements)
        printf("device %d to device %d: %u elements right, %.1f GB/s, %s\n", peer->from, peer->to, peer->elements,
               peer->bandwidth / 1e9, peer->direct ? "directly" : "by way of the host's memory");
    print_failures(&peer->failures);
}

/* Both directions: a link may be good in one only. */
static int run_peers(const arguments *arguments)
{
    nv_peer peer;
    int good = 1;

    for (int i = 0; i < 2; i++) {
        good &= nv_cuda_peer(arguments->peer[i], arguments->peer[!i], &peer);
        if (arguments->json && i)
            printf(", ");
        if (arguments->json)
            print_json_peer(&peer);
        else
            print_peer(&peer);
    }
    return good;
}

static int run_all(const arguments *arguments)
{
    nv_driver driver;
    int opened = nv_cuda_open(arguments->library, &driver), good = opened;
    int first = arguments->device < 0 ? 0 : arguments->device;
    int end = arguments->device < 0 ? driver.devices : first + 1;

    if (arguments->json) {
        printf("{");
        print_json_member("library", driver.library);
        print_json_version(driver.version);
        print_json_times(driver.ms);
        print_json_failures(&driver.failures);
        printf(", \"devices\": [");
    } else {
        print_driver(&driver);
    }
    /* One bad device doesn't hide the others. */
    for (int ordinal = first; opened && ordinal < end; ordinal++) {
        if (arguments->json && ordinal > first)
            printf(", ");
        good &= run_device(ordinal, arguments->json);
    }
    if (arguments->json)
        printf("], \"peers\": [");
    if (opened && arguments->peer[0] >= 0)
        good &= run_peers(arguments);
    if (arguments->json)
        printf("]}\n");
    return good;
}

/* Decimal digits only; strtol has been renamed by newer headers to a symbol that older images lack. */
static int parse_number(const char *text)
{
    int value = 0;

    if (!*text)
        return -1;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || value > 99999)
            return -1;
        value = value * 10 + (*text - '0');
    }
    return value;
}

static int parse(int count, char **words, arguments *arguments)
{
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "--json")) {
            arguments->json = 1;
        } else if (!strcmp(words[i], "--device") && i + 1 < count) {
            arguments->device = parse_number(words[++i]);
            if (arguments->device < 0)
                return 0;
        } else if (!strcmp(words[i], "--peer") && i + 2 < count) {
            arguments->peer[0] = parse_number(words[++i]);
            arguments->peer[1] = parse_number(words[++i]);
            if (arguments->peer[0] < 0 || arguments->peer[1] < 0 || arguments->peer[0] == arguments->peer[1])
                return 0;
        } else if (!strcmp(words[i], "--library") && i + 1 < count) {
            arguments->library = words[++i];
        } else {
            return 0;
        }
    }
    return 1;
}

/* `used`: where _start is ours, its call is all that names main, and link-time optimisation can't see it. */
__attribute__((used)) int main(int count, char **words)
{
    arguments arguments = {.device = -1, .peer = {-1, -1}};

    if (!parse(count, words, &arguments)) {
        fprintf(stderr, "usage: cuda-check [--device N] [--peer N N] [--json] [--library PATH]\n");
        return 2;
    }
    return run_all(&arguments) ? 0 : 1;
}

#endif
