// SPDX-License-Identifier: BSL-1.0
// What collectives.bench.cpp measures, by MPI_Allreduce: "<name> <ranks> <mode> <bytes> <microseconds>".
#include <mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(void const* a, void const* b) {
    double const x = *(double const*)a;
    double const y = *(double const*)b;
    return (x > y) - (x < y);
}

static int between(int least, double value, int most) {
    return value < least ? least : value > most ? most : (int)value;
}

static int agree(int number) {
    MPI_Bcast(&number, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return number;
}

static void all_reduce(float* data, size_t count) {
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void prepare(float* data, size_t bytes, int is_fresh) {
    if (is_fresh) {
        memset(data, 0, bytes);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

// The same batches as in collectives.bench.cpp.
static double time_of(float* data, size_t bytes, int is_fresh, double budget) {
    static double times[5000];
    size_t const count = bytes / sizeof(float);
    for (int i = 0; i < 3; ++i) {
        prepare(data, bytes, is_fresh);
        all_reduce(data, count);
    }
    double start = MPI_Wtime();
    for (int i = 0; i < 5; ++i) {
        prepare(data, bytes, is_fresh);
        all_reduce(data, count);
    }
    double const one = (MPI_Wtime() - start) / 5;
    int const batch = agree(is_fresh ? 1 : between(1, 20e-6 / one, 200));
    int const batches = agree(between(7, budget / one / batch, 5000));
    for (int b = 0; b < batches; ++b) {
        prepare(data, bytes, is_fresh);
        start = MPI_Wtime();
        for (int i = 0; i < batch; ++i) {
            all_reduce(data, count);
        }
        times[b] = (MPI_Wtime() - start) / batch;
    }
    qsort(times, (size_t)batches, sizeof *times, by_value);
    return times[batches / 2];
}

int main(int argc, char** argv) {
    char const* const given = getenv("SIZES"); // in bytes
    char const* next = given != NULL ? given : "8 1024 65536 1048576 26214400 104857600";
    char const* const text = getenv("BUDGET");
    double const budget = text != NULL ? atof(text) : 0.1;
    int rank;
    int ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (char* end; *next != '\0'; next = end) {
        size_t const bytes = strtoul(next, &end, 10);
        if (end == next) {
            break;
        }
        float* const data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        for (size_t i = 0; i < bytes / sizeof(float); ++i) {
            data[i] = (float)(rank + 1);
        }
        all_reduce(data, bytes / sizeof(float));
        for (size_t i = 0; i < bytes / sizeof(float); ++i) {
            if (data[i] != (float)(ranks * (ranks + 1) / 2)) {
                fputs("the sum is wrong\n", stderr);
                abort();
            }
        }
        for (int is_fresh = 0; is_fresh < (bytes < 64 << 10 ? 1 : 2); ++is_fresh) {
            memset(data, 0, bytes);
            double const time = time_of(data, bytes, is_fresh, budget);
            if (rank == 0) {
                printf(
                    "%s %d %s %zu %.4f\n",
                    argc > 1 ? argv[1] : "mpi",
                    ranks,
                    is_fresh ? "fresh" : "same",
                    bytes,
                    time * 1e6
                );
                fflush(stdout);
            }
        }
        free(data);
    }
    MPI_Finalize();
    return 0;
}
