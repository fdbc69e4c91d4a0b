/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated libcuda: it loads, tells its version, and says truthfully that there is no GPU. */

#define NO_DEVICE 100

/* Which driver a program really got: the file's own version, whatever link it was found through. */
const char *simulated_driver_version(void)
{
	return DRIVER_VERSION;
}

int cuInit(unsigned flags)
{
	return flags == 0 ? NO_DEVICE : 1;
}

int cuDriverGetVersion(int *version)
{
	*version = CUDA_VERSION;
	return 0;
}

int cuGetErrorName(int error, const char **text)
{
	*text = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
	return 0;
}

int cuGetErrorString(int error, const char **text)
{
	*text = error == NO_DEVICE ? "no CUDA-capable device is detected" : "invalid argument";
	return 0;
}
