// The kernels of the forward pass. Compiled by NVRTC at run time, by nvcc where the sources are checked, and by a C++
// compiler for the emulated driver, which brings its own definitions of what CUDA has built in
// (tests/kit/emulation/emulation.h). No header is included, because NVRTC has none.
//
// Conventions
// 1. Every number that is not a weight is f32, in buffers of the program's own, which are aligned. Weights lie where
//    their file has them: rows follow each other without gaps, and may begin at any address (quantised ones at an even
//    one, which the host checks).
// 2. Sums are in f32, in a fixed order: bits of a product depend on the row and the vector alone, and bits of attention on
//    the query and on the keys and values up to its position. What shares a launch with them, and how a prompt is cut into
//    passes, changes none. Where rounding is left to a compiler, it might round one copy of a loop otherwise than another:
//    there, products are written as fmaf or __fmul_rn.
// 3. A warp leaves as a whole or not at all before a shuffle, a block before a barrier.
//
// Formats: ggml-common.h and ggml-quants.c of llama.cpp. Attention with running maxima: Milakov and Gimelshein, Online
// normalizer calculation for softmax (2018); Dao et al., FlashAttention (2022).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Lanes of a warp, warps of a block, and lanes of a block. The host launches blocks of this size.
#define LANES 32
#define WARPS 8
#define THREADS (LANES * WARPS)
// Lanes of the one block that looks at all logits.
#define THREADS_ALL 1024
// The host launches only kernels whose source has the host's own interface number. Raise both numbers with every change
// of what the host has to know: names, parameters, which block and lane does what.
#define INTERFACE kernels_interface_6

#define DEVICE static __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

extern "C" __global__ void INTERFACE() {}

// ---- numbers ----

#ifndef EMULATED
DEVICE float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE u16 half_of_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Copies 16 bytes, which are aligned on both sides, from global to shared memory. They are there for this lane once it
// has waited for the copies that it committed, and for others behind a barrier.
DEVICE void copy_async(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}
DEVICE void copies_commit() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}
// Waits until no more than the last PENDING commits may still be on their way.
template <int PENDING> DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
// `address`, which was read from memory, as a pointer to `count` numbers that are read, or written.
template <class T> DEVICE const T *followed(u64 address, u32) {
    return (const T *)address;
}
template <class T> DEVICE T *followed_to_write(u64 address, u32) {
    return (T *)address;
}
#endif

DEVICE float float_of_bfloat(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
DEVICE u16 bfloat_of_float(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return (u16)(bits >> 16 | 0x40);
    }
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DEVICE u32 byte_of(const u32 *words, int index) {
    return words[index / 4] >> (8 * (index % 4)) & 255;
}

DEVICE float signed_byte(u32 byte) {
    return (float)(signed char)byte;
}

// ---- sums ----

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The sum over a block of THREADS, for every lane.
DEVICE float block_sum(float value) {
    __shared__ float parts[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % LANES == 0) {
        parts[threadIdx.x / LANES] = value;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        sum += parts[i];
    }
    return sum;
}

