/* A driver's library with GPUs as the file in FAKE_NVML says: "count mode". Modes: ok, hang, lost, old, mig, user.
   The power limit of GPU 0, say, is in that file's name with ".0"; 300000 mW without it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LOST = 15 };
static unsigned count;
static char mode[16];

static void look(void)
{
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (file == NULL || fscanf(file, "%u %15s", &count, mode) != 2)
        count = 0;
    if (file != NULL)
        fclose(file);
    while (strcmp(mode, "hang") == 0)
        sleep(1);
}

static int status(void *device)
{
    return strcmp(mode, "lost") == 0 && device == (void *)2 ? LOST : OK;
}

int nvmlInit_v2(void)
{
    look();
    return strcmp(mode, "unloaded") == 0 ? DRIVER_NOT_LOADED : OK;
}

int nvmlDeviceGetCount_v2(unsigned *found)
{
    look();
    *found = count;
    return strcmp(mode, "unloaded") == 0 ? UNINITIALIZED : OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)(long)(index + 1);
    return status(*device);
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{
    snprintf(text, size, "GPU-%ld", (long)device - 1);
    return status(device);
}

int nvmlDeviceGetName(void *device, char *text, unsigned size)
{
    snprintf(text, size, "Fake: 9000");
    return status(device);
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates)
{
    rates[0] = 75;
    rates[1] = 20;
    return strcmp(mode, "mig") == 0 ? NOT_SUPPORTED : status(device);
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    memory[0] = 1ull << 34;
    memory[1] = 1ull << 33;
    memory[2] = 1ull << 33;
    return status(device);
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { *mw = 250500; return status(device); }

static FILE *limit_of(void *device, const char *how)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.%ld", getenv("FAKE_NVML"), (long)device - 1);
    return fopen(path, how);
}

int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *mw)
{
    FILE *file = limit_of(device, "r");
    *mw = 300000;
    if (file != NULL) {
        if (fscanf(file, "%u", mw) != 1)
            *mw = 0;
        fclose(file);
    }
    return strcmp(mode, "mig") == 0 ? NOT_SUPPORTED : status(device);
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw)
{
    nvmlDeviceGetPowerManagementLimit(device, mw);
    return status(device);
}

int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *least, unsigned *most)
{
    *least = 100000;
    *most = 350000;
    return status(device);
}

int nvmlDeviceSetPowerManagementLimit(void *device, unsigned mw)
{
    FILE *file;
    if (strcmp(mode, "user") == 0)
        return NO_PERMISSION;
    if (mw < 100000 || mw > 350000)
        return INVALID;
    file = limit_of(device, "w");
    if (file == NULL)
        return UNINITIALIZED;
    fprintf(file, "%u", mw);
    fclose(file);
    return status(device);
}

int nvmlDeviceGetHandleByUUID(const char *text, void **device)
{
    long index;
    if (sscanf(text, "GPU-%ld", &index) != 1)
        return INVALID;
    *device = (void *)(index + 1);
    return status(*device);
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 60 + sensor; return status(device); }
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) { *mhz = 1000 + type; return status(device); }

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors)
{
    *errors = 3 + kind + counter;
    return status(device);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons)
{
    *reasons = 0x4 | 0x40; /* the power limit that a user set, and heat */
    return status(device);
}

#ifndef OLD
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 5000123; return status(device); }

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *found, void *list)
{
    *found = list == NULL ? 2 : 0;
    return INSUFFICIENT_SIZE;
}
#endif
