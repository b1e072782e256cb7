// Runs the soak's kernels, from their own source, one thread after another, and prints the words that come out.

#include <cstdint>
#include <cstdio>
#include <vector>

struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, blockDim = {32, 1, 1}, gridDim = {4, 1, 1};
#define __device__
#define __global__
static unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    unsigned long long before = *at;
    *at += value;
    return before;
}

#include KERNELS

template <class Kernel> static void launch(Kernel kernel) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) kernel();
}

int main() {
    std::vector<u64> one(1000), other(1000);
    for (u64 at = 0; at < 1000; at++) one[at] = at * at + 7, other[at] = at ^ 0x55;
    u64 sum = 5, by_table = 0, table[2] = {(u64)other.data(), (u64)one.data()};
    launch([&] { soak_stamp((u64)one.data(), 300, 500, 0x1234567, 99, 3); });
    launch([&] { soak_sum((u64)one.data(), 1000, (u64)&sum, 3); });
    launch([&] { soak_table_sum((u64)table, 2, 1000, (u64)&by_table, 3); });
    std::printf("%llx %llx\n", sum, by_table);
}
