/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 without a GPU, for tests of hook/cuda.c: host memory stands for the device's, and a kernel
 * is done by its name on the CPU when the context is synchronised. The environment says what goes wrong:
 *
 *   FAKECUDA_DEVICES=N       devices, default 1; with 0 cuInit fails as the real one does
 *   FAKECUDA_FAIL=NAME=CODE  every call of NAME, with or without _v2, returns CODE; NAME@K=CODE: only on
 *                            device K, or with the context of device K current
 *   FAKECUDA_WRONG=I         element I of the result is one too great
 *   FAKECUDA_NO_TAIL=1       the last, uneven block is not run
 *   FAKECUDA_OVERRUN=1       the last block writes past the end
 *   FAKECUDA_HELLO=TEXT      printed instead of what the PTX says
 *   FAKECUDA_PEER=0          no device reaches another's memory
 *   FAKECUDA_PEER_WRONG=I    a copy between devices spoils its element I
 *   FAKECUDA_PEER_LOST=1     a copy between devices does nothing
 *   FAKECUDA_LOG=FILE        one line for each call
 *   FAKECUDA_PTX=FILE        the text given to the compiler
 *
 * -DOLD leaves out the symbols of CUDA 11, -DINCOMPLETE leaves out cuLaunchKernel. tests/simhost/cuda.c includes this
 * file and brings other devices.
 */
#ifndef SIMULATED
#define _DEFAULT_SOURCE 1
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_MAX_BYTES = 64, KERNELS = 8 };

struct fake_function {
    char name[NAME_MAX_BYTES];
};

struct launch {
    const struct fake_function *function;
    unsigned int grid, block, count;
    float *out;
    const float *x, *b;
    float a;
};

static int current = -1; /* device whose context is current */
static char greeting[256];
static struct launch pending[KERNELS];
static int launches;

static void record(const char *call, int code)
{
    const char *path = getenv("FAKECUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;

    if (!log)
        return;
    fprintf(log, "%s %d\n", call, code);
    fclose(log);
}

/* The code that FAKECUDA_FAIL sets for this call, else 0; writes the call down. */
static int begin(const char *call, int device)
{
    char name[NAME_MAX_BYTES] = "", plain[NAME_MAX_BYTES];
    const char *fail = getenv("FAKECUDA_FAIL");
    int at = device, code = 0;

    snprintf(plain, sizeof plain, "%s", call);
    if (strlen(plain) > 3 && !strcmp(plain + strlen(plain) - 3, "_v2"))
        plain[strlen(plain) - 3] = 0;
    if (fail && sscanf(fail, "%63[^@=]@%d=%d", name, &at, &code) != 3 &&
        sscanf(fail, "%63[^@=]=%d", name, &code) != 2)
        abort();
    if (strcmp(name, call) != 0 && strcmp(name, plain) != 0)
        code = 0;
    if (at != device)
        code = 0;
    record(call, code);
    return code;
}

#define BEGIN(device)                              \
    do {                                           \
        int fail_code = begin(__func__, (device)); \
        if (fail_code)                             \
            return fail_code;                      \
    } while (0)

static int number(const char *variable, int unset)
{
    const char *value = getenv(variable);

    return value ? atoi(value) : unset;
}

#ifndef SIMULATED
#define CUDA_VERSION 12040

static int devices(void)
{
    return number("FAKECUDA_DEVICES", 1);
}

static void name_of(int ordinal, char *name, int size)
{
    snprintf(name, (size_t)size, "Fake \"GPU\" %d", ordinal);
}

static void uuid_of(int ordinal, unsigned char *uuid)
{
    for (int i = 0; i < 16; i++)
        uuid[i] = (unsigned char)(i * 17);
    uuid[15] = (unsigned char)ordinal;
}

static void bus_id_of(int ordinal, char *bus_id, int size)
{
    snprintf(bus_id, (size_t)size, "0000:%02x:00.0", 0x17 + ordinal);
}
#endif

int cuGetErrorName(int code, const char **name)
{
    switch (code) {
    case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 100: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
    case 101: *name = "CUDA_ERROR_INVALID_DEVICE"; return 0;
    case 218: *name = "CUDA_ERROR_INVALID_PTX"; return 0;
    case 221: *name = "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"; return 0;
    case 700: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0;
    case 704: *name = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"; return 0;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0;
    default: *name = NULL; return 1;
    }
}

int cuGetErrorString(int code, const char **text)
{
    switch (code) {
    case 2: *text = "out of memory"; return 0;
    case 100: *text = "no device"; return 0;
    case 101: *text = "invalid device"; return 0;
    case 218: *text = "the PTX is \"bad\""; return 0;
    case 221: *text = "no PTX compiler"; return 0;
    case 700: *text = "illegal address"; return 0;
    case 704: *text = "it is on already"; return 0;
    case 803: *text = "versions differ"; return 0;
    default: *text = NULL; return 1;
    }
}

int cuInit(unsigned int flags)
{
    char line[256];

    snprintf(line, sizeof line, "cuInit(%u) CUDA_DEVICE_ORDER=%s CUDA_CACHE_DISABLE=%s", flags,
             getenv("CUDA_DEVICE_ORDER"), getenv("CUDA_CACHE_DISABLE"));
    record(line, 0);
    BEGIN(-1);
    return devices() ? 0 : 100;
}

int cuDriverGetVersion(int *version)
{
    BEGIN(-1);
    *version = CUDA_VERSION;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    BEGIN(-1);
    *count = devices();
    return 0;
}

/* Handles differ from ordinals, so that one taken for the other is noticed. */
enum { HANDLE = 1000 };

int cuDeviceGet(int *device, int ordinal)
{
    BEGIN(ordinal);
    *device = HANDLE + ordinal;
    return ordinal >= 0 && ordinal < devices() ? 0 : 101;
}

int cuDeviceGetName(char *name, int size, int device)
{
    BEGIN(device - HANDLE);
    name_of(device - HANDLE, name, size);
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    BEGIN(device - HANDLE);
    uuid_of(device - HANDLE, uuid);
    return 0;
}

#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    BEGIN(device - HANDLE);
    uuid_of(device - HANDLE, uuid);
    return 0;
}
#endif

int cuDeviceGetPCIBusId(char *bus_id, int size, int device)
{
    BEGIN(device - HANDLE);
    bus_id_of(device - HANDLE, bus_id, size);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN(device - HANDLE);
    if (attribute != 75 && attribute != 76)
        return 1;
    *value = attribute == 75 ? 9 : 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(uintptr_t *context, int device)
{
    BEGIN(device - HANDLE);
    *context = (uintptr_t)device;
    return 0;
}

#ifdef OLD
int cuDevicePrimaryCtxRelease(int device)
#else
int cuDevicePrimaryCtxRelease_v2(int device)
#endif
{
    BEGIN(device - HANDLE);
    return 0;
}

int cuCtxSetCurrent(uintptr_t context)
{
    BEGIN(context ? (int)context - HANDLE : current);
    current = context ? (int)context - HANDLE : -1;
    return 0;
}

/* The text whose bytes the PTX lists, read back from it. */
static int read_greeting(const char *image)
{
    const char *at = strstr(image, ".b8 greeting[");
    char *end;

    at = at ? strchr(at, '{') : NULL;
    memset(greeting, 0, sizeof greeting);
    for (size_t i = 0; at && *at != '}' && i < sizeof greeting; i++) {
        greeting[i] = (char)strtol(at + 1, &end, 10);
        at = end;
    }
    return at != NULL;
}

int cuModuleLoadDataEx(const char **module, const char *image, unsigned int count, int *options, void **values)
{
    const char *path = getenv("FAKECUDA_PTX");
    FILE *copy = path ? fopen(path, "w") : NULL;
    int code = begin(__func__, current);

    if (copy) {
        fputs(image, copy);
        fclose(copy);
    }
    /* The error buffer and its size, as the option numbers 5 and 6. */
    if (code && count == 2 && options[0] == 5 && options[1] == 6)
        snprintf(values[0], (size_t)values[1], "line 3; \"fatal\": bad\ttarget");
    if (code)
        return code;
    *module = image;
    return strncmp(image, ".version ", 9) == 0 && read_greeting(image) ? 0 : 218;
}

int cuModuleGetFunction(struct fake_function **function, const char *module, const char *name)
{
    static struct fake_function known[2];
    struct fake_function *found = &known[strcmp(name, "nvhook_line") == 0];
    char entry[NAME_MAX_BYTES + 16];

    BEGIN(current);
    snprintf(entry, sizeof entry, ".visible .entry %s(", name);
    if (!strstr(module, entry))
        return 500;
    snprintf(found->name, sizeof found->name, "%s", name);
    *function = found;
    return 0;
}

int cuModuleUnload(const char *module)
{
    BEGIN(current);
    return module ? 0 : 1;
}

int cuMemAlloc_v2(void **pointer, size_t size)
{
    BEGIN(current);
    *pointer = malloc(size);
    return *pointer ? 0 : 2;
}

int cuMemFree_v2(void *pointer)
{
    BEGIN(current);
    free(pointer);
    return 0;
}

int cuMemcpyHtoD_v2(void *to, const void *from, size_t size)
{
    BEGIN(current);
    memcpy(to, from, size);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, const void *from, size_t size)
{
    BEGIN(current);
    memcpy(to, from, size);
    return 0;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    BEGIN(device - HANDLE);
    *can = number("FAKECUDA_PEER", 1);
    return device == peer ? 101 : 0;
}

int cuCtxEnablePeerAccess(uintptr_t peer, unsigned int flags)
{
    BEGIN(current);
    return peer && !flags ? 0 : 1;
}

int cuCtxDisablePeerAccess(uintptr_t peer)
{
    BEGIN(current);
    return peer ? 0 : 1;
}

int cuMemcpyPeer(void *to, uintptr_t to_context, const void *from, uintptr_t from_context, size_t size)
{
    int wrong = number("FAKECUDA_PEER_WRONG", -1);

    BEGIN(current);
    if (!to_context || !from_context || to_context == from_context)
        return 1;
    if (!number("FAKECUDA_PEER_LOST", 0))
        memcpy(to, from, size);
    if (wrong >= 0)
        ((uint32_t *)to)[wrong] ^= 1;
    return 0;
}

#ifndef INCOMPLETE
int cuLaunchKernel(const struct fake_function *function, unsigned int grid_x, unsigned int grid_y,
                   unsigned int grid_z, unsigned int block_x, unsigned int block_y, unsigned int block_z,
                   unsigned int shared_bytes, void *stream, void **parameters, void **extra)
{
    struct launch *launch = &pending[launches];

    BEGIN(current);
    if (launches == KERNELS || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes ||
        stream || extra)
        return 1;
    memset(launch, 0, sizeof *launch);
    launch->function = function;
    launch->grid = grid_x;
    launch->block = block_x;
    /* The driver copies parameters at the launch: the caller's variables may be gone at the end. */
    if (parameters) {
        memcpy(&launch->out, parameters[0], sizeof launch->out);
        memcpy(&launch->x, parameters[1], sizeof launch->x);
        memcpy(&launch->b, parameters[2], sizeof launch->b);
        memcpy(&launch->a, parameters[3], sizeof launch->a);
        memcpy(&launch->count, parameters[4], sizeof launch->count);
    }
    launches++;
    return 0;
}
#endif

static void run_line(const struct launch *launch)
{
    unsigned int blocks = launch->grid - (unsigned int)number("FAKECUDA_NO_TAIL", 0);
    unsigned int end = launch->count + (unsigned int)number("FAKECUDA_OVERRUN", 0);
    int wrong = number("FAKECUDA_WRONG", -1);

    for (unsigned int i = 0; i < blocks * launch->block; i++) {
        if (i < launch->count)
            launch->out[i] = launch->a * launch->x[i] + launch->b[i];
        else if (i < end)
            launch->out[i] = 0;
    }
    if (wrong >= 0)
        launch->out[wrong] += 1;
}

static void run_hello(const struct launch *launch)
{
    const char *other = getenv("FAKECUDA_HELLO");

    for (unsigned int thread = 0; thread < launch->grid * launch->block; thread++) {
        if (other)
            printf("%s", other);
        else
            printf(greeting, thread);
    }
}

int cuCtxSynchronize(void)
{
    int count = launches;

    launches = 0;
    BEGIN(current);
    for (int i = 0; i < count; i++) {
        if (strcmp(pending[i].function->name, "nvhook_line") == 0)
            run_line(&pending[i]);
        else
            run_hello(&pending[i]);
    }
    return 0;
}
