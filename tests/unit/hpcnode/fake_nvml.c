/* A driver's library with GPUs as the file in FAKE_NVML says: "count mode". Modes: ok, hang, lost, old, mig. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LOST = 15 };
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
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { *mw = 300000; return status(device); }
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
