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

// Eight bytes of a block, which begins at an even address. Reads whole words, and no word that has none of the bytes.
DEVICE void load_eight(const u8 *from, u32 *words) {
    u32 skipped = (u32)(u64)from & 2;
    const u32 *whole = (const u32 *)(from - skipped);
    u32 first = whole[0], second = whole[1], third = skipped != 0 ? whole[2] : 0;
    words[0] = __funnelshift_r(first, second, 8 * skipped);
    words[1] = __funnelshift_r(second, third, 8 * skipped);
}

DEVICE float half_at(const u8 *from) {
    return float_of_half(*(const u16 *)from);
}

// ---- formats: eight weights at a time ----
//
// A format has ELEMENTS and BYTES of a block, and `unpack`, which gives the weights 8 * part .. 8 * part + 8 of one as
// `*scale * out[i] + *least`. Formats that are not SCALED leave `scale` alone, and those without a LEAST `least`. What
// is not exact here is written as single operations, so that no compiler rounds it otherwise in one kernel than in
// another.

// Blocks of eight plain numbers, so that all formats are alike; a row need not be a whole number of them.
struct F32 {
    enum { ELEMENTS = 8, BYTES = 32, PLAIN = 4, SCALED = 0, LEAST = 0 };
    DEVICE float one(const u8 *at) {
        return __uint_as_float(at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24);
    }
    DEVICE void unpack(const u8 *block, u32, float *out, float *, float *) {
        u32 words[8];
        load_words<8>(block, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = __uint_as_float(words[i]);
        }
    }
};

struct F16 {
    enum { ELEMENTS = 8, BYTES = 16, PLAIN = 2, SCALED = 0, LEAST = 0 };
    DEVICE float one(const u8 *at) {
        return float_of_half((u16)(at[0] | (u32)at[1] << 8));
    }
    DEVICE void unpack(const u8 *block, u32, float *out, float *, float *) {
        u32 words[4];
        load_words<4>(block, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = float_of_half((u16)(words[i / 2] >> (16 * (i % 2))));
        }
    }
};

struct BF16 {
    enum { ELEMENTS = 8, BYTES = 16, PLAIN = 2, SCALED = 0, LEAST = 0 };
    DEVICE float one(const u8 *at) {
        return float_of_bfloat((u16)(at[0] | (u32)at[1] << 8));
    }
    DEVICE void unpack(const u8 *block, u32, float *out, float *, float *) {
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
    enum { ELEMENTS = 32, BYTES = 18, PLAIN = 0, SCALED = 1, LEAST = 0 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *) {
        *scale = half_at(block);
        u32 words[2];
        load_nibbles(block + 2, part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (float)byte_of(words, i) - 8.0f;
        }
    }
};

struct Q4_1 {
    enum { ELEMENTS = 32, BYTES = 20, PLAIN = 0, SCALED = 1, LEAST = 1 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *least) {
        *scale = half_at(block);
        *least = half_at(block + 2);
        u32 words[2];
        load_nibbles(block + 4, part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (float)byte_of(words, i);
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
    enum { ELEMENTS = 32, BYTES = 22, PLAIN = 0, SCALED = 1, LEAST = 0 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *) {
        *scale = half_at(block);
        u32 values[8];
        load_fives(block + 2, block + 6, part, values);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (float)values[i] - 16.0f;
        }
    }
};

struct Q5_1 {
    enum { ELEMENTS = 32, BYTES = 24, PLAIN = 0, SCALED = 1, LEAST = 1 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *least) {
        *scale = half_at(block);
        *least = half_at(block + 2);
        u32 values[8];
        load_fives(block + 4, block + 8, part, values);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (float)values[i];
        }
    }
};

struct Q8_0 {
    enum { ELEMENTS = 32, BYTES = 34, PLAIN = 0, SCALED = 1, LEAST = 0 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *) {
        *scale = half_at(block);
        u32 words[2];
        load_eight(block + 2 + 8 * part, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = signed_byte(byte_of(words, i));
        }
    }
};

// 16 bytes, each with the scale and the minimum of 16 weights, then two bits a weight: one byte has four weights that
// are 32 apart.
struct Q2_K {
    enum { ELEMENTS = 256, BYTES = 84, PLAIN = 0, SCALED = 1, LEAST = 1 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *least) {
        u32 both = block[part / 2];
        *scale = __fmul_rn(half_at(block + 80), (float)(both & 15));
        *least = -__fmul_rn(half_at(block + 82), (float)(both >> 4));
        u32 words[2], shift = 2 * (part / 4 % 4);
        load_eight(block + 16 + 32 * (part / 16) + 8 * (part % 4), words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = (float)(byte_of(words, i) >> shift & 3);
        }
    }
};

// The high bit of each weight, two low bits as in Q2_K, then 16 scales of six bits: four bits of each, and further on
// the other two.
struct Q3_K {
    enum { ELEMENTS = 256, BYTES = 110, PLAIN = 0, SCALED = 1, LEAST = 0 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *) {
        const u8 *scales = block + 96;
        u32 s = part / 2;
        u32 six = (scales[s % 8] >> (4 * (s / 8)) & 15) | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4;
        *scale = __fmul_rn(half_at(block + 108), (float)six - 32.0f);
        u32 high[2], low[2], bit = part / 4, shift = 2 * (part / 4 % 4);
        load_eight(block + 8 * (part % 4), high);
        load_eight(block + 32 + 32 * (part / 16) + 8 * (part % 4), low);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 value = (byte_of(low, i) >> shift & 3) | (byte_of(high, i) >> bit & 1) << 2;
            out[i] = (float)value - 4.0f;
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
    enum { ELEMENTS = 256, BYTES = FIVE ? 176 : 144, PLAIN = 0, SCALED = 1, LEAST = 1 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *least) {
        u32 j = part / 4, factor, min, words[2], high[2];
        scale_and_min(block + 4, j, &factor, &min);
        *scale = __fmul_rn(half_at(block), (float)factor);
        *least = -__fmul_rn(half_at(block + 2), (float)min);
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
            out[i] = (float)value;
        }
    }
};

struct Q6_K {
    enum { ELEMENTS = 256, BYTES = 210, PLAIN = 0, SCALED = 1, LEAST = 0 };
    DEVICE void unpack(const u8 *block, u32 part, float *out, float *scale, float *) {
        u32 half = part / 16, quarter = part / 4 % 4, low[2], high[2];
        load_eight(block + 64 * half + 32 * (quarter % 2) + 8 * (part % 4), low);
        load_eight(block + 128 + 32 * half + 8 * (part % 4), high);
        *scale = __fmul_rn(half_at(block + 208), signed_byte(block[192 + part / 2]));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 value = (byte_of(low, i) >> (4 * (quarter / 2)) & 15) | (byte_of(high, i) >> (2 * quarter) & 3) << 4;
            out[i] = (float)value - 32.0f;
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
    float scale = 1.0f, least = 0.0f;
    Format::unpack(row + (u64)(group / parts) * Format::BYTES, group % parts, out, &scale, &least);
#pragma unroll
    for (int i = 0; i < 8 && Format::SCALED != 0; i++) {
        out[i] = Format::LEAST != 0 ? fmaf(scale, out[i], least) : __fmul_rn(scale, out[i]);
    }
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

// Every format by its name, in the order of the host's numbers of them.
#define EACH_FORMAT(DO)                                                                                                \
    DO(f32, F32, 0) DO(f16, F16, 1) DO(bf16, BF16, 2) DO(q4_0, Q4_0, 3) DO(q4_1, Q4_1, 4) DO(q5_0, Q5_0, 5)            \
    DO(q5_1, Q5_1, 6) DO(q8_0, Q8_0, 7) DO(q2_k, Q2_K, 8) DO(q3_k, Q3_K, 9) DO(q4_k, Q45_K<false>, 10)                 \
    DO(q5_k, Q45_K<true>, 11) DO(q6_k, Q6_K, 12)

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

extern "C" __global__ void __launch_bounds__(THREADS) decode(const u8 *row, float *out, u32 dtype, u32 k) {
#define DECODE(name, Format, number)                                                                                   \
    case number:                                                                                                       \
        decode_row<Format>(row, out, k);                                                                               \
        break;
    switch (dtype) {
        EACH_FORMAT(DECODE)
    }
}

// Bytes of a row of k weights of a format by its number.
DEVICE u64 bytes_of_row(u32 dtype, u32 k) {
#define BYTES_OF_ROW(name, Format, number)                                                                             \
    case number:                                                                                                       \
        return Format::PLAIN != 0 ? (u64)k * Format::PLAIN : (u64)(k / Format::ELEMENTS) * Format::BYTES;
    switch (dtype) {
        EACH_FORMAT(BYTES_OF_ROW)
    }
    return 0;
}
