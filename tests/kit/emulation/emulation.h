// What CUDA C has built in, for a C++ compiler: the kernels' own source becomes host functions.
//
// A block's lanes are fibers of one thread. A lane runs until it has to wait for others, at a barrier or a shuffle, and
// gives way to the next; the last to arrive goes on at once. So every lane sees what CUDA promises it, and nothing more
// is promised here: a shared variable that is read without a barrier holds whatever an earlier lane left there.
// Each thread runs one block at a time, in no order that holds between threads, and launches run one at a time.
#ifndef OUTCORE_EMULATION_H
#define OUTCORE_EMULATION_H

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EMULATED
#define __device__
// Left alone where the names of all kernels are looked for.
#ifndef NAME_KERNELS
#define __global__
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// A thread runs one block at a time, so one copy for each thread serves all.
#define __shared__ static thread_local
#define __syncthreads() emulation::barrier()
#define threadIdx (emulation::self()->thread)
#define blockIdx (*emulation::self()->block)
#define gridDim (emulation::grid)

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace emulation {

struct Dim {
    unsigned x, y, z;
};

// What kernels see of a lane, and what runs it.
struct Lane {
    Dim thread;
    const Dim *block;
    struct Fiber *fiber;
};

// Bytes of a lane's stack. It begins at a multiple of this, with the lane's address.
const size_t STACK = 64 << 10;

// The lane that calls this.
inline Lane *self() {
    return *(Lane **)((uintptr_t)__builtin_frame_address(0) & ~(STACK - 1));
}

extern Dim &grid;

void barrier();
// Leaves `mine` for the other lanes of the warp and returns what lane `index ^ distance` has left.
uint64_t exchange(unsigned mask, uint64_t mine, int distance);
// Notes a copy of 16 bytes; it is made when the lane waits for the commit that it belongs to.
void copy_later(void *to, const void *from);
void commit();
void wait(unsigned pending);
// Where device memory is on the host, whose address a kernel read from memory.
uintptr_t follow(uint64_t address, uint64_t bytes, bool write);

float float_of_half(unsigned short bits);
unsigned short half_of_float(float value);

template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "only the type may change");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace emulation

inline float __int_as_float(int value) { return emulation::bits<float>(value); }
inline float __uint_as_float(unsigned value) { return emulation::bits<float>(value); }
inline unsigned __float_as_uint(float value) { return emulation::bits<unsigned>(value); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline float float_of_half(unsigned short bits) { return emulation::float_of_half(bits); }
inline unsigned short half_of_float(float value) { return emulation::half_of_float(value); }
inline void copy_async(void *shared, const void *global) { emulation::copy_later(shared, global); }
inline void copies_commit() { emulation::commit(); }
template <int PENDING> inline void copies_wait() { emulation::wait(PENDING); }
template <class T> inline const T *followed(uint64_t address, unsigned count) {
    return (const T *)emulation::follow(address, (uint64_t)count * sizeof(T), false);
}
template <class T> inline T *followed_to_write(uint64_t address, unsigned count) {
    return (T *)emulation::follow(address, (uint64_t)count * sizeof(T), true);
}
inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
    return emulation::bits<float>((unsigned)emulation::exchange(mask, emulation::bits<unsigned>(value), distance));
}
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance) {
    return (unsigned)emulation::exchange(mask, value, distance);
}

#endif
