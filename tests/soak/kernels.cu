// The kernels of the soak. kernels.ptx is made of this file by scripts/soak_kernels.sh, as text that every driver since
// CUDA 11 translates for its GPU. lib.rs has the same arithmetic for the host.

typedef unsigned long long u64;

// How much a word counts, by its place. It is odd, so no bit of a word is lost.
__device__ static u64 weight(u64 place) {
    u64 z = (place + 1) * 0x9E3779B97F4A7C15ull;
    z ^= z >> 29;
    return (z * 0xBF58476D1CE4E5B9ull) | 1;
}

// Takes `steps` steps, each from the one before, so that whatever is behind it begins late. Whether to go on depends on
// the result, which is so for all values but one; thus the compiler cannot leave the steps out.
__device__ static bool late(u64 steps) {
    u64 x = blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 step = 0; step < steps; step++) x = x * 6364136223846793005ull + 1442695040888963407ull;
    return x != 2685821657736338717ull;
}

// Adds the weighted sum of `words` words from `from` on to the word at `out`.
extern "C" __global__ void soak_sum(u64 from, u64 words, u64 out, u64 steps) {
    if (!late(steps)) return;
    const u64* data = (const u64*)from;
    u64 sum = 0, stride = gridDim.x * blockDim.x;
    for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < words; at += stride) sum += data[at] * weight(at);
    atomicAdd((u64*)out, sum);
}

// The same for `count` blocks of `words` words, whose addresses are in a table in device memory. A block's sum counts
// by its place in the table.
extern "C" __global__ void soak_table_sum(u64 table, u64 count, u64 words, u64 out, u64 steps) {
    if (!late(steps)) return;
    u64 sum = 0, stride = gridDim.x * blockDim.x;
    for (u64 block = 0; block < count; block++) {
        const u64* data = (const u64*)((const u64*)table)[block];
        u64 part = 0;
        for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < words; at += stride) part += data[at] * weight(at);
        sum += part * weight(block);
    }
    atomicAdd((u64*)out, sum);
}

// Makes `words` words from word `first` of `to` on `factor` times what they are, plus a stamp and a number that grows
// with the place. With a factor of 0 nothing of the old words stays.
extern "C" __global__ void soak_stamp(u64 to, u64 first, u64 words, u64 factor, u64 stamp, u64 steps) {
    if (!late(steps)) return;
    u64* data = (u64*)to;
    u64 stride = gridDim.x * blockDim.x;
    for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < words; at += stride) {
        u64 place = first + at;
        data[place] = data[place] * factor + stamp + place * 0xD1342543DE82EF95ull;
    }
}
