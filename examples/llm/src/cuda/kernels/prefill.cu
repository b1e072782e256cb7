// ---- prompts: matrices and vectors as 16-bit numbers, for a library that multiplies them ----
//
// The library wants addresses and distances that are multiples of 16 bytes, so rows of both are `ld` numbers apart, a
// multiple of eight. What lies between k and ld is zero.

// The largest f16. A weight beyond it becomes this, with its sign: no model has one.
#define HALF_MAX 65504.0f

DEVICE void store_eight(u16 *to, const u16 *values) {
    uint4 four;
    four.x = values[0] | (u32)values[1] << 16;
    four.y = values[2] | (u32)values[3] << 16;
    four.z = values[4] | (u32)values[5] << 16;
    four.w = values[6] | (u32)values[7] << 16;
    *(uint4 *)to = four;
}

// Rows of k weights as f16. A lane has eight of them.
template <class Format> DEVICE void tile_rows(const u8 *weights, u16 *out, u32 k, u32 rows, u32 ld) {
    typedef Of<Format, Format::PLAIN> F;
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    u32 groups = ld / 8, group = (u32)(at % groups);
    u64 row = at / groups;
    if (row >= rows) {
        return;
    }
    u64 row_bytes = F::PLAIN != 0 ? (u64)k * F::PLAIN : (u64)(k / F::ELEMENTS) * F::BYTES;
    float values[8];
    u16 halves[8];
    decode_group<F>(weights + row * row_bytes, group, k, values);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float value = values[i] > HALF_MAX ? HALF_MAX : values[i];
        halves[i] = half_of_float(value < -HALF_MAX ? -HALF_MAX : value);
    }
    store_eight(out + row * ld + 8 * (u64)group, halves);
}

#define TILE(name, Format, number)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) tile_##name(const u8 *weights, u16 *out, u32 k, u32 rows,    \
        u32 ld) {                                                                                                      \
        tile_rows<Format>(weights, out, k, rows, ld);                                                                  \
    }

EACH_FORMAT(TILE)

// The largest of a block's values, for every lane.
DEVICE float block_max(float value) {
    __shared__ float peaks[WARPS];
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    if (threadIdx.x % LANES == 0) {
        peaks[threadIdx.x / LANES] = value;
    }
    __syncthreads();
    float peak = peaks[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        peak = fmaxf(peak, peaks[i]);
    }
    return peak;
}

// Vectors of k as f16 times a power of two each, a block a vector. The power puts the largest number of a vector into
// [2^13, 2^14): nothing overflows, and what is smaller by a factor of up to 2^28 keeps all bits of an f16. A vector of
// zeros, of numbers below 2^-113, or with one that is not finite stays as it is.
extern "C" __global__ void __launch_bounds__(THREADS) halves_f16(const float *x, u16 *out, float *scales, u32 k,
    u32 ld) {
    const float *from = x + (u64)blockIdx.x * k;
    u16 *to = out + (u64)blockIdx.x * ld;
    float peak = 0.0f;
    for (u32 i = threadIdx.x; i < k; i += THREADS) {
        peak = fmaxf(peak, fabsf(from[i]));
    }
    u32 exponent = __float_as_uint(block_max(peak)) >> 23;
    bool scaled = exponent >= 14 && exponent < 255;
    float scale = scaled ? __uint_as_float((exponent - 13) << 23) : 1.0f;
    float inverse = scaled ? __uint_as_float((267 - exponent) << 23) : 1.0f;
    for (u32 i = threadIdx.x; i < ld; i += THREADS) {
        to[i] = i < k ? half_of_float(from[i] * inverse) : 0;
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale;
    }
}

// Vectors of k as bf16, a block a vector.
extern "C" __global__ void __launch_bounds__(THREADS) halves_bf16(const float *x, u16 *out, u32 k, u32 ld) {
    const float *from = x + (u64)blockIdx.x * k;
    u16 *to = out + (u64)blockIdx.x * ld;
    for (u32 i = threadIdx.x; i < ld; i += THREADS) {
        to[i] = i < k ? bfloat_of_float(from[i]) : 0;
    }
}

// Undoes the scaling for m vectors (y) of n products, which are `pitch` apart, and `stride` in `out`, and adds a number
// for each of the n. They are added to what is there if `accumulate` is not 0. Without scales these are 1, without a
// bias it is 0.
extern "C" __global__ void __launch_bounds__(THREADS) unscale(const float *products, const float *scales,
    const float *bias, float *out, u32 n, u32 pitch, u32 stride, u32 accumulate) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        float value = products[(u64)blockIdx.y * pitch + i] * (scales != 0 ? scales[blockIdx.y] : 1.0f);
        float *to = out + (u64)blockIdx.y * stride + i;
        value += bias != 0 ? bias[i] : 0.0f;
        *to = accumulate != 0 ? *to + value : value;
    }
}
