// The kernels of the forward pass. Compiled by NVRTC at run time, by nvcc where the sources are checked, and by a C++
// compiler for the emulated driver, which brings its own definitions of what CUDA has built in
// (examples/llm/tests/cuda/emulation.h). No header is included, because NVRTC has none.
//
// Conventions
// 1. Every number that is not a weight is f32, in buffers of the program's own, which are aligned. Weights lie where
//    their file has them: rows follow each other without gaps, and may begin at any address (quantised ones at an even
//    one, which the host checks).
// 2. Sums are in f32. The sum for one row and one vector is made in the same order however many vectors there are, so
//    how a prompt is cut into passes changes no bit.
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
// Rows that one loading of activations serves, and vectors that one decoding of a weight serves.
#define ROWS 4
#define VECTORS 8
// Blocks of keys and values that one launch is given at most.
#define BLOCKS 64

// The host launches only kernels whose source has the host's own interface number. Raise both numbers with every change
// of what the host has to know: names, parameters, which block and lane does what.
#define INTERFACE kernels_interface_3

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

// ---- loads ----

// N words from any address, in the widest pieces that its alignment allows.
template <int N> DEVICE void load_words(const u8 *from, u32 *words) {
    u64 address = (u64)from;
    if (N % 4 == 0 && address % 16 == 0) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint4 four = ((const uint4 *)from)[i];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    } else if (address % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            words[i] = ((const u32 *)from)[i];
        }
    } else if (address % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            words[i] = ((const u16 *)from)[2 * i] | (u32)((const u16 *)from)[2 * i + 1] << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            words[i] = from[4 * i] | (u32)from[4 * i + 1] << 8 | (u32)from[4 * i + 2] << 16 | (u32)from[4 * i + 3] << 24;
        }
    }
}

// Eight bytes of a block, which begins at an even address.
DEVICE void load_eight(const u8 *from, u32 *words) {
    if ((u64)from % 4 == 0) {
        words[0] = ((const u32 *)from)[0];
        words[1] = ((const u32 *)from)[1];
    } else {
        const u16 *halves = (const u16 *)from;
        words[0] = halves[0] | (u32)halves[1] << 16;
        words[1] = halves[2] | (u32)halves[3] << 16;
    }
}

DEVICE float half_at(const u8 *from) {
    return float_of_half(*(const u16 *)from);
}

// ---- formats: eight weights at a time ----
//
// A format has ELEMENTS and BYTES of a block, and `decode`, which gives the weights 8 * part .. 8 * part + 8 of one.

// Blocks of eight plain numbers, so that all formats are alike; a row need not be a whole number of them.
struct F32 {
    enum { ELEMENTS = 8, BYTES = 32, PLAIN = 4 };
    DEVICE float one(const u8 *at) {
        return __uint_as_float(at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24);
    }
    DEVICE void decode(const u8 *block, u32, float *out) {
        u32 words[8];
        load_words<8>(block, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = __uint_as_float(words[i]);
        }
    }
};

struct F16 {
    enum { ELEMENTS = 8, BYTES = 16, PLAIN = 2 };
    DEVICE float one(const u8 *at) {
        return float_of_half((u16)(at[0] | (u32)at[1] << 8));
    }
    DEVICE void decode(const u8 *block, u32, float *out) {
        u32 words[4];
        load_words<4>(block, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = float_of_half((u16)(words[i / 2] >> (16 * (i % 2))));
        }
    }
};

struct BF16 {
    enum { ELEMENTS = 8, BYTES = 16, PLAIN = 2 };
    DEVICE float one(const u8 *at) {
        return float_of_bfloat((u16)(at[0] | (u32)at[1] << 8));
    }
    DEVICE void decode(const u8 *block, u32, float *out) {
        u32 words[4];
        load_words<4>(block, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = float_of_bfloat((u16)(words[i / 2] >> (16 * (i % 2))));
        }
    }
};

// Bytes 0..16 hold weight i in their low half and weight 16 + i in their high half.
DEVICE void load_nibbles(const u8 *bytes, u32 part, u32 *words) {
    load_eight(bytes + 8 * (part % 2), words);
    u32 shift = 4 * (part / 2);
    words[0] = words[0] >> shift & 0x0f0f0f0f;
    words[1] = words[1] >> shift & 0x0f0f0f0f;
}

struct Q4_0 {
    enum { ELEMENTS = 32, BYTES = 18, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block);
        u32 words[2];
        load_nibbles(block + 2, part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = d * ((float)byte_of(words, i) - 8.0f);
        }
    }
};

struct Q4_1 {
    enum { ELEMENTS = 32, BYTES = 20, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block), min = half_at(block + 2);
        u32 words[2];
        load_nibbles(block + 4, part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = d * (float)byte_of(words, i) + min;
        }
    }
};

// Eight values of five bits: four from `nibbles`, the fifth of weight i in bit i of the word at `high`.
DEVICE void load_fives(const u8 *high, const u8 *nibbles, u32 part, u32 *values) {
    u32 words[2];
    load_nibbles(nibbles, part, words);
    const u16 *halves = (const u16 *)high;
    u32 bits = (halves[0] | (u32)halves[1] << 16) >> (8 * part);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        values[i] = byte_of(words, i) | (bits >> i & 1) << 4;
    }
}

struct Q5_0 {
    enum { ELEMENTS = 32, BYTES = 22, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block);
        u32 values[8];
        load_fives(block + 2, block + 6, part, values);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = d * ((float)values[i] - 16.0f);
        }
    }
};

struct Q5_1 {
    enum { ELEMENTS = 32, BYTES = 24, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block), min = half_at(block + 2);
        u32 values[8];
        load_fives(block + 4, block + 8, part, values);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = d * (float)values[i] + min;
        }
    }
};

struct Q8_0 {
    enum { ELEMENTS = 32, BYTES = 34, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block);
        u32 words[2];
        load_eight(block + 2 + 8 * part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = d * signed_byte(byte_of(words, i));
        }
    }
};

// 16 bytes, each with the scale and the minimum of 16 weights, then two bits a weight: one byte has four weights that
// are 32 apart.
struct Q2_K {
    enum { ELEMENTS = 256, BYTES = 84, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        float d = half_at(block + 80), dmin = half_at(block + 82);
        u32 both = block[part / 2];
        float scale = d * (float)(both & 15), min = dmin * (float)(both >> 4);
        u32 words[2], shift = 2 * (part / 4 % 4);
        load_eight(block + 16 + 32 * (part / 16) + 8 * (part % 4), words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = scale * (float)(byte_of(words, i) >> shift & 3) - min;
        }
    }
};

// The high bit of each weight, two low bits as in Q2_K, then 16 scales of six bits: four bits of each, and further on
// the other two.
struct Q3_K {
    enum { ELEMENTS = 256, BYTES = 110, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        const u8 *scales = block + 96;
        u32 s = part / 2;
        u32 six = (scales[s % 8] >> (4 * (s / 8)) & 15) | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4;
        float scale = half_at(block + 108) * ((float)six - 32.0f);
        u32 high[2], low[2], bit = part / 4, shift = 2 * (part / 4 % 4);
        load_eight(block + 8 * (part % 4), high);
        load_eight(block + 32 + 32 * (part / 16) + 8 * (part % 4), low);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 value = (byte_of(low, i) >> shift & 3) | (byte_of(high, i) >> bit & 1) << 2;
            out[i] = scale * ((float)value - 4.0f);
        }
    }
};

// The scale and the minimum of sub-block `j` of a Q4_K or Q5_K block, from its 12 packed bytes.
DEVICE void scale_and_min(const u8 *s, u32 j, u32 *scale, u32 *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        *min = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
}

template <bool FIVE> struct Q45_K {
    enum { ELEMENTS = 256, BYTES = FIVE ? 176 : 144, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        u32 j = part / 4, scale, min, words[2], high[2];
        scale_and_min(block + 4, j, &scale, &min);
        float d = half_at(block) * (float)scale, dmin = half_at(block + 2) * (float)min;
        load_eight(block + (FIVE ? 48 : 16) + 32 * (j / 2) + 8 * (part % 4), words);
        if (FIVE) {
            load_eight(block + 16 + 8 * (part % 4), high);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 value = byte_of(words, i) >> (4 * (j % 2)) & 15;
            if (FIVE) {
                value |= (byte_of(high, i) >> j & 1) << 4;
            }
            out[i] = d * (float)value - dmin;
        }
    }
};

struct Q6_K {
    enum { ELEMENTS = 256, BYTES = 210, PLAIN = 0 };
    DEVICE void decode(const u8 *block, u32 part, float *out) {
        u32 half = part / 16, quarter = part / 4 % 4, low[2], high[2];
        load_eight(block + 64 * half + 32 * (quarter % 2) + 8 * (part % 4), low);
        load_eight(block + 128 + 32 * half + 8 * (part % 4), high);
        float scale = half_at(block + 208) * signed_byte(block[192 + part / 2]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 value = (byte_of(low, i) >> (4 * (quarter / 2)) & 15) | (byte_of(high, i) >> (2 * quarter) & 3) << 4;
            out[i] = scale * ((float)value - 32.0f);
        }
    }
};

// Weights 8 * group .. 8 * group + 8 of a row of k. What lies beyond a row of plain numbers is zero, and not read.
template <class Format> DEVICE void decode_group(const u8 *row, u32 group, u32 k, float *out) {
    if (Format::PLAIN != 0 && 8 * group + 8 > k) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 at = 8 * group + i;
            out[i] = at < k ? Format::one(row + (u64)at * Format::PLAIN) : 0.0f;
        }
        return;
    }
    const u32 parts = Format::ELEMENTS / 8;
    Format::decode(row + (u64)(group / parts) * Format::BYTES, group % parts, out);
}

// Quantised formats never call `one`. They get it here, so that all formats have the same functions.
template <class Format, int PLAIN> struct Of : Format {};
template <class Format> struct Of<Format, 0> : Format {
    DEVICE float one(const u8 *) {
        return 0.0f;
    }
};

// Eight activations; zero beyond the vector's end.
DEVICE void load_activations(const float *x, u32 group, u32 k, float *out) {
    const float *from = x + 8 * (u64)group;
    if (8 * group + 8 <= k && (u64)from % 16 == 0) {
        float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
        out[0] = a.x;
        out[1] = a.y;
        out[2] = a.z;
        out[3] = a.w;
        out[4] = b.x;
        out[5] = b.y;
        out[6] = b.z;
        out[7] = b.w;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        out[i] = 8 * group + i < k ? from[i] : 0.0f;
    }
}

// ---- sums ----

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// N sums over a warp, a power of two: lane l has that of values[l / (LANES / N)]. In each step half of the values that
// are left go to the other half of the lanes. Every sum is made in the order of `warp_sum`.
template <int N> DEVICE float warp_sums(float *values) {
    u32 lane = threadIdx.x % LANES;
    int distance = LANES / 2;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        bool upper = (lane & (u32)distance) != 0;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float kept = upper ? values[i + half] : values[i];
            float given = upper ? values[i] : values[i + half];
            values[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
        }
        distance /= 2;
    }
    float sum = values[0];
#pragma unroll
    for (; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    return sum;
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

// ---- weights ----

// out[j * stride + r] = dot(row r, vector j) for `rows` rows of k weights and m vectors; added to what is there where
// `accumulate` is not 0. A warp has R rows and N vectors; blocks have WARPS times R rows (x) and N vectors (y).
template <class Format, int R, int N>
DEVICE void multiply(const u8 *weights, const float *x, float *out, u32 k, u32 rows, u32 m, u32 stride, u32 accumulate) {
    typedef Of<Format, Format::PLAIN> F;
    u32 lane = threadIdx.x % LANES, row = (blockIdx.x * WARPS + threadIdx.x / LANES) * R, first = blockIdx.y * N;
    if (row >= rows) {
        return;
    }
    u64 row_bytes = F::PLAIN != 0 ? (u64)k * F::PLAIN : (u64)(k / F::ELEMENTS) * F::BYTES;
    const u8 *from = weights + row * row_bytes;
    float sums[R * N];
#pragma unroll
    for (int i = 0; i < R * N; i++) {
        sums[i] = 0.0f;
    }
    for (u32 group = lane; group < (k + 7) / 8; group += LANES) {
        float w[R][8];
#pragma unroll
        for (int r = 0; r < R; r++) {
            // Beyond the last row, the last row is decoded again: its sums are not stored.
            decode_group<F>(from + min((u32)r, rows - 1 - row) * row_bytes, group, k, w[r]);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (first + j >= m) {
                break;
            }
            float y[8];
            load_activations(x + (u64)(first + j) * k, group, k, y);
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sums[r * N + j] += w[r][i] * y[i];
                }
            }
        }
    }
    float sum = warp_sums<R * N>(sums);
    const u32 each = LANES / (R * N);
    u32 index = lane / each, r = row + index / N, j = first + index % N;
    if (lane % each == 0 && r < rows && j < m) {
        float *to = out + (u64)j * stride + r;
        *to = accumulate != 0 ? *to + sum : sum;
    }
}

// out[i] = weight i of a row of k. A lane has eight.
template <class Format> DEVICE void decode_row(const u8 *row, float *out, u32 k) {
    u32 group = blockIdx.x * THREADS + threadIdx.x;
    if (group >= (k + 7) / 8) {
        return;
    }
    float w[8];
    decode_group<Of<Format, Format::PLAIN> >(row, group, k, w);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (8 * group + i < k) {
            out[8 * (u64)group + i] = w[i];
        }
    }
}

#define WEIGHT_KERNELS(name, Format)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) matvec_##name(const u8 *weights, const float *x, float *out, \
        u32 k, u32 rows, u32 m, u32 stride, u32 accumulate) {                                                          \
        multiply<Format, ROWS, 1>(weights, x, out, k, rows, m, stride, accumulate);                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) matmul_##name(const u8 *weights, const float *x, float *out, \
        u32 k, u32 rows, u32 m, u32 stride, u32 accumulate) {                                                          \
        multiply<Format, 1, VECTORS>(weights, x, out, k, rows, m, stride, accumulate);                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##name(const u8 *row, float *out, u32 k) {            \
        decode_row<Format>(row, out, k);                                                                               \
    }

WEIGHT_KERNELS(f32, F32)
WEIGHT_KERNELS(f16, F16)
WEIGHT_KERNELS(bf16, BF16)
WEIGHT_KERNELS(q4_0, Q4_0)
WEIGHT_KERNELS(q4_1, Q4_1)
WEIGHT_KERNELS(q5_0, Q5_0)
WEIGHT_KERNELS(q5_1, Q5_1)
WEIGHT_KERNELS(q8_0, Q8_0)
WEIGHT_KERNELS(q2_k, Q2_K)
WEIGHT_KERNELS(q3_k, Q3_K)
WEIGHT_KERNELS(q4_k, Q45_K<false>)
WEIGHT_KERNELS(q5_k, Q45_K<true>)
WEIGHT_KERNELS(q6_k, Q6_K)

// ---- between the matrices ----

// out = x / rms(x) * weight for vectors of n, a block each. `out` may be `x`.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const float *x, const float *weight, float *out, u32 n,
    float epsilon) {
    const float *from = x + (u64)blockIdx.x * n;
    float *to = out + (u64)blockIdx.x * n;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        squares += from[i] * from[i];
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / (float)n + epsilon);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        to[i] = from[i] * scale * weight[i];
    }
}

// Turns pairs of every head of m positions from `first` on, a lane each. Elements (2i, 2i + 1) are a pair, or
// (i, i + pairs) where `halves` is not 0; what is beyond the pairs stays.
extern "C" __global__ void __launch_bounds__(THREADS) rope(float *x, const float *frequencies, u32 m, u32 heads,
    u32 head_size, u32 pairs, u32 first, u32 halves) {
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (u64)m * heads * pairs) {
        return;
    }
    u32 pair = (u32)(at % pairs);
    u64 head = at / pairs;
    float sine, cosine;
    sincosf((float)(first + (u32)(head / heads)) * frequencies[pair], &sine, &cosine);
    float *a = x + head * head_size + (halves != 0 ? pair : 2 * pair);
    float *b = a + (halves != 0 ? pairs : 1);
    float p = *a, q = *b;
    *a = p * cosine - q * sine;
    *b = p * sine + q * cosine;
}

// Stores m new keys and values behind `past` others: [head][position][element], with room for `capacity` positions.
extern "C" __global__ void __launch_bounds__(THREADS) append(const float *k, const float *v, float *keys, float *values,
    u32 m, u32 heads, u32 head_size, u32 capacity, u32 past) {
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (u64)m * heads * head_size) {
        return;
    }
    u32 element = (u32)(at % head_size), head = (u32)(at / head_size % heads), t = (u32)(at / head_size / heads);
    u64 to = ((u64)head * capacity + past + t) * head_size + element;
    keys[to] = k[at];
    values[to] = v[at];
}

// What a warp has of softmax(q k^T) v so far: the largest score, the sum of the shares, and the values by their shares.
// A lane has elements lane, lane + 32, .. of the head: E of them at most.
template <int E> struct Running {
    float peak, total, sum[E];

    DEVICE void begin(Running &r) {
        r.peak = -INFINITE;
        r.total = 0.0f;
#pragma unroll
        for (int i = 0; i < E; i++) {
            r.sum[i] = 0.0f;
        }
    }

    // One more position. What was summed is rescaled when the largest score grows.
    DEVICE void see(Running &r, const float *query, const float *key, const float *value, u32 head_size) {
        u32 lane = threadIdx.x % LANES;
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < E; i++) {
            u32 element = lane + LANES * i;
            score = element < head_size ? fmaf(query[i], key[element], score) : score;
        }
        score = warp_sum(score);
        float higher = fmaxf(r.peak, score);
        float keep = expf(r.peak - higher), share = expf(score - higher);
        r.peak = higher;
        r.total = fmaf(r.total, keep, share);
#pragma unroll
        for (int i = 0; i < E; i++) {
            u32 element = lane + LANES * i;
            r.sum[i] = fmaf(r.sum[i], keep, element < head_size ? share * value[element] : 0.0f);
        }
    }
};

// A lane's elements of a query, scaled.
template <int E> DEVICE void load_query(const float *query, u32 head_size, float scale, float *mine) {
#pragma unroll
    for (int i = 0; i < E; i++) {
        u32 element = threadIdx.x % LANES + LANES * i;
        mine[i] = element < head_size ? query[element] * scale : 0.0f;
    }
}

// What the warps of a thread block have together: for every lane the largest score, the sum of the shares, and of the
// values element threadIdx.x of the head, which is 0 beyond it. A warp without a position counts nothing; warp 0 has
// one. There are at least as many lanes as a head has elements.
template <int E> DEVICE void merge_warps(const Running<E> &r, u32 head_size, float *peak, float *total, float *sum) {
    __shared__ float peaks[WARPS], totals[WARPS], sums[WARPS][E * LANES];
    u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    // The lanes may still read what was merged before.
    __syncthreads();
    if (lane == 0) {
        peaks[warp] = r.peak;
        totals[warp] = r.total;
    }
#pragma unroll
    for (int i = 0; i < E; i++) {
        sums[warp][lane + LANES * i] = r.sum[i];
    }
    __syncthreads();
    float highest = -INFINITE, all = 0.0f, mixed = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        highest = fmaxf(highest, peaks[w]);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        all = fmaf(totals[w], expf(peaks[w] - highest), all);
    }
    if (threadIdx.x < head_size) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            mixed = fmaf(sums[w][threadIdx.x], expf(peaks[w] - highest), mixed);
        }
    }
    *peak = highest;
    *total = all;
    *sum = mixed;
}

// One head (x) of one of m positions (y): softmax(q k^T * scale) v over the `past + y + 1` positions so far. The warps
// of the thread block share the positions.
template <int E>
DEVICE void attend(const float *q, const float *keys, const float *values, float *out, u32 heads, u32 kv_heads,
    u32 head_size, u32 capacity, u32 past, float scale) {
    u32 warp = threadIdx.x / LANES, head = blockIdx.x, t = blockIdx.y;
    u64 base = (u64)(head / (heads / kv_heads)) * capacity * head_size;
    float query[E], peak, total, mixed;
    load_query<E>(q + ((u64)t * heads + head) * head_size, head_size, scale, query);
    Running<E> running;
    Running<E>::begin(running);
    for (u32 position = warp; position < past + t + 1; position += WARPS) {
        u64 at = base + (u64)position * head_size;
        Running<E>::see(running, query, keys + at, values + at, head_size);
    }
    merge_warps<E>(running, head_size, &peak, &total, &mixed);
    if (threadIdx.x < head_size) {
        out[((u64)t * heads + head) * head_size + threadIdx.x] = mixed / total;
    }
}

#define ATTENTION(size)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##size(const float *q, const float *keys,          \
        const float *values, float *out, u32 m, u32 heads, u32 kv_heads, u32 head_size, u32 capacity, u32 past,        \
        float scale) {                                                                                                 \
        if (blockIdx.y < m) {                                                                                          \
            attend<size / LANES>(q, keys, values, out, heads, kv_heads, head_size, capacity, past, scale);             \
        }                                                                                                              \
    }

ATTENTION(64)
ATTENTION(128)
ATTENTION(256)

// ---- keys and values in blocks ----
//
// A table has the addresses of one layer's rows in blocks that follow one another: [keys, values][position][head]
// [element], of `block_tokens` positions each. It comes with the launch, so nothing has to be copied to the GPU first.
struct Table {
    u64 at[BLOCKS];
};

DEVICE float *row_of(u64 block, u32 token, u32 row) {
    return (float *)block + (u64)token * row;
}

// Stores `count` keys and values of `row` numbers behind the first `filled` positions of the table's first block.
extern "C" __global__ void __launch_bounds__(THREADS) append_to_blocks(const float *k, const float *v, Table blocks,
    u32 count, u32 row, u32 block_tokens, u32 filled) {
    u64 at = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (u64)count * row) {
        return;
    }
    u32 element = (u32)(at % row), place = filled + (u32)(at / row);
    u64 block = blocks.at[place / block_tokens];
    u32 token = place % block_tokens;
    row_of(block, token, row)[element] = k[at];
    row_of(block, block_tokens + token, row)[element] = v[at];
}

// As `attend`, over the blocks of one wave, the first of whose positions is `first`. Waves come in the order of their
// positions, the first one at 0. Between them `out` has the values by their shares, and `state` the largest score and
// the sum of the shares, of each head of each position; in the wave of its own position a head gets its result.
//
// Blocks are summed up one by one, in order, each by itself. So a result depends on the positions and on how many a
// block has, but neither on waves nor on passes. The sums are written as fmaf, so that no compiler can choose to round
// them otherwise in one copy of the loop than in another.
template <int E>
DEVICE void attend_blocks(const float *q, const Table &blocks, float *out, float *state, u32 heads, u32 kv_heads,
    u32 head_size, u32 block_tokens, u32 count, u32 first, u32 past, float scale) {
    u32 warp = threadIdx.x / LANES, head = blockIdx.x, t = blockIdx.y;
    if (past + t < first) {
        return;
    }
    // Of its own position, counted from the wave's first one.
    u32 own = past + t - first, row = kv_heads * head_size;
    u64 which = (u64)t * heads + head;
    float *kept = state + 2 * which, *to = out + which * head_size;
    float query[E], peak = -INFINITE, total = 0.0f, mixed = 0.0f;
    load_query<E>(q + which * head_size, head_size, scale, query);
    if (first > 0) {
        peak = kept[0];
        total = kept[1];
        mixed = threadIdx.x < head_size ? to[threadIdx.x] : 0.0f;
    }
    for (u32 nth = 0; nth < count && nth * block_tokens <= own; nth++) {
        u32 seen = min(block_tokens, own - nth * block_tokens + 1);
        const float *keys = row_of(blocks.at[nth], 0, row) + head / (heads / kv_heads) * head_size;
        Running<E> running;
        Running<E>::begin(running);
        for (u32 token = warp; token < seen; token += WARPS) {
            const float *key = keys + (u64)token * row;
            Running<E>::see(running, query, key, key + (u64)block_tokens * row, head_size);
        }
        float block_peak, block_total, block_mixed;
        merge_warps<E>(running, head_size, &block_peak, &block_total, &block_mixed);
        float higher = fmaxf(peak, block_peak);
        float keep = expf(peak - higher), share = expf(block_peak - higher);
        peak = higher;
        total = fmaf(total, keep, block_total * share);
        mixed = fmaf(mixed, keep, block_mixed * share);
    }
    bool ends = own < count * block_tokens;
    if (threadIdx.x < head_size) {
        to[threadIdx.x] = ends ? mixed / total : mixed;
    }
    if (threadIdx.x == 0 && !ends) {
        kept[0] = peak;
        kept[1] = total;
    }
}

// Four thread blocks at a time on a multiprocessor: for more, ptxas would have too few registers.
#define ATTENTION_TO_BLOCKS(size)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) attention_to_blocks_##size(const float *q, Table blocks,  \
        float *out, float *state, u32 m, u32 heads, u32 kv_heads, u32 head_size, u32 block_tokens, u32 count,          \
        u32 first, u32 past, float scale) {                                                                            \
        if (blockIdx.y < m) {                                                                                          \
            attend_blocks<size / LANES>(q, blocks, out, state, heads, kv_heads, head_size, block_tokens, count, first, \
                past, scale);                                                                                          \
        }                                                                                                              \
    }

ATTENTION_TO_BLOCKS(64)
ATTENTION_TO_BLOCKS(128)
ATTENTION_TO_BLOCKS(256)


// gate = silu(gate) * up, n numbers.
extern "C" __global__ void __launch_bounds__(THREADS) silu_multiply(float *gate, const float *up, u64 n) {
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

// x[i] += y[i % period], n numbers.
extern "C" __global__ void __launch_bounds__(THREADS) add(float *x, const float *y, u64 n, u32 period) {
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        x[i] += y[i % period];
    }
}

// ---- choosing a token ----

// The largest of n logits and where it is, for every lane of the one block; of equals the first. NaN never wins. If
// nothing wins, it is the first.
DEVICE void largest(const float *logits, u32 n, float *peak, u32 *where) {
    __shared__ float peaks[THREADS_ALL / LANES];
    __shared__ u32 places[THREADS_ALL / LANES];
    float best = -INFINITE;
    u32 at = 0xffffffffu;
    for (u32 i = threadIdx.x; i < n; i += THREADS_ALL) {
        if (logits[i] > best) {
            best = logits[i];
            at = i;
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, best, distance);
        u32 place = __shfl_xor_sync(0xffffffffu, at, distance);
        if (other > best || (other == best && place < at)) {
            best = other;
            at = place;
        }
    }
    if (threadIdx.x % LANES == 0) {
        peaks[threadIdx.x / LANES] = best;
        places[threadIdx.x / LANES] = at;
    }
    __syncthreads();
    best = peaks[0];
    at = places[0];
    for (int i = 1; i < THREADS_ALL / LANES; i++) {
        if (peaks[i] > best || (peaks[i] == best && places[i] < at)) {
            best = peaks[i];
            at = places[i];
        }
    }
    *peak = best;
    *where = at == 0xffffffffu ? 0 : at;
}

// The token with the largest of n logits.
extern "C" __global__ void __launch_bounds__(THREADS_ALL) argmax(const float *logits, u32 *token, u32 n) {
    float peak;
    u32 where;
    largest(logits, n, &peak, &where);
    if (threadIdx.x == 0) {
        *token = where;
    }
}

// A token drawn from softmax(logits / temperature) by `uniform`, which is at least 0 and less than 1. Lanes have
// consecutive stretches of the tokens, whose odds one lane then goes through in the tokens' order.
extern "C" __global__ void __launch_bounds__(THREADS_ALL) sample(const float *logits, u32 *token, u32 n,
    float temperature, double uniform) {
    __shared__ double odds[THREADS_ALL];
    float peak;
    u32 where, each = (n + THREADS_ALL - 1) / THREADS_ALL;
    largest(logits, n, &peak, &where);
    double sum = 0.0;
    for (u32 i = threadIdx.x * each; i < min((threadIdx.x + 1) * each, n); i++) {
        sum += exp((double)((logits[i] - peak) / temperature));
    }
    odds[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    double left = 0.0;
    for (u32 i = 0; i < THREADS_ALL; i++) {
        left += odds[i];
    }
    left *= uniform;
    u32 stretch = 0;
    while (stretch + 1 < THREADS_ALL && left >= odds[stretch]) {
        left -= odds[stretch];
        stretch++;
    }
    u32 chosen = n - 1;
    for (u32 i = stretch * each; i < n; i++) {
        left -= exp((double)((logits[i] - peak) / temperature));
        if (left < 0.0) {
            chosen = i;
            break;
        }
    }
    *token = chosen;
}

#ifndef __CUDACC_RTC__
#include "kernels/prefill.cu"
#endif
