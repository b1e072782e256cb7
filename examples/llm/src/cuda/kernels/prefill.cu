// ---- prompts: matrices and vectors as 16-bit numbers, for a library that multiplies them ----
//
// The library wants addresses and distances that are multiples of 16 bytes, so rows of both are `ld` numbers apart, a
// multiple of eight. What lies between k and ld is zero.

// The largest f16. A weight, a key or a value beyond it becomes this, with its sign: no model has one.
#define HALF_MAX 65504.0f

DEVICE u16 bounded_half(float value) {
    value = value > HALF_MAX ? HALF_MAX : value;
    return half_of_float(value < -HALF_MAX ? -HALF_MAX : value);
}

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
        halves[i] = bounded_half(values[i]);
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

// The power of two by which a vector is multiplied to become f16, and its inverse. It puts the largest number of the
// vector into [2^13, 2^14): nothing overflows, and what is smaller by a factor of up to 2^28 keeps all bits of an f16. A
// vector of zeros, of numbers below 2^-113, or with one that is not finite stays as it is.
struct Power {
    float scale, inverse;
};

DEVICE Power power_of(float peak) {
    u32 exponent = __float_as_uint(peak) >> 23;
    bool scaled = exponent >= 14 && exponent < 255;
    Power power = {1.0f, 1.0f};
    if (scaled) {
        power.scale = __uint_as_float((exponent - 13) << 23);
        power.inverse = __uint_as_float((267 - exponent) << 23);
    }
    return power;
}

// What the numbers of a vector are multiplied with by a norm, besides its weights: 1 without one.
DEVICE float norm_scale(const float *from, const u8 *norm, float epsilon, u32 k) {
    if (norm == 0) {
        return 1.0f;
    }
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < k; i += THREADS) {
        squares += from[i] * from[i];
    }
    return 1.0f / sqrtf(block_sum(squares) / (float)k + epsilon);
}

DEVICE float normed_at(const float *from, const u8 *norm, u32 norm_dtype, float scale, u32 i) {
    return norm == 0 ? from[i] : from[i] * scale * plain_at(norm, norm_dtype, i);
}

// Vectors of k as f16 times a power of two each, a block a vector. Where there is a norm, they go through that first.
extern "C" __global__ void __launch_bounds__(THREADS) halves_f16(const float *x, const u8 *norm, u16 *out,
    float *scales, u32 norm_dtype, float epsilon, u32 k, u32 ld) {
    const float *from = x + (u64)blockIdx.x * k;
    u16 *to = out + (u64)blockIdx.x * ld;
    float scale = norm_scale(from, norm, epsilon, k), peak = 0.0f;
    for (u32 i = threadIdx.x; i < k; i += THREADS) {
        peak = fmaxf(peak, fabsf(normed_at(from, norm, norm_dtype, scale, i)));
    }
    Power power = power_of(block_max(peak));
    for (u32 i = threadIdx.x; i < ld; i += THREADS) {
        to[i] = i < k ? half_of_float(normed_at(from, norm, norm_dtype, scale, i) * power.inverse) : 0;
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = power.scale;
    }
}

// As halves_f16, as bf16.
extern "C" __global__ void __launch_bounds__(THREADS) halves_bf16(const float *x, const u8 *norm, u16 *out,
    u32 norm_dtype, float epsilon, u32 k, u32 ld) {
    const float *from = x + (u64)blockIdx.x * k;
    u16 *to = out + (u64)blockIdx.x * ld;
    float scale = norm_scale(from, norm, epsilon, k);
    for (u32 i = threadIdx.x; i < ld; i += THREADS) {
        to[i] = i < k ? bfloat_of_float(normed_at(from, norm, norm_dtype, scale, i)) : 0;
    }
}

// Undoes the scaling for m vectors (y) of n products, which are `pitch` apart, and `stride` in `out`, and adds a number
// for each of the n. What comes of it is stored, added to what is there, or multiplied by silu of what is there. Without
// scales these are 1, without a bias it is 0.
extern "C" __global__ void __launch_bounds__(THREADS) unscale(const float *products, const float *scales,
    const u8 *bias, float *out, u32 bias_dtype, u32 n, u32 pitch, u32 stride, u32 after) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        float value = products[(u64)blockIdx.y * pitch + i] * (scales != 0 ? scales[blockIdx.y] : 1.0f);
        float *to = out + (u64)blockIdx.y * stride + i;
        value += bias != 0 ? plain_at(bias, bias_dtype, i) : 0.0f;
        if (after == AFTER_ADD) {
            value = *to + value;
        } else if (after == AFTER_GATE) {
            value = *to / (1.0f + expf(-*to)) * value;
        }
        *to = value;
    }
}

// ---- prompts: attention by a library's products ----
//
// A tile is some positions of a sequence and some of the vectors of a pass. The library multiplies its queries by its
// keys, a kernel makes shares of these scores, and the library multiplies the shares by the values and adds that to the
// sums of the tiles before. Heads that share keys and values are rows of one matrix, and each head of keys and values has
// a product of its own, all in one call: [head of keys and values][vector][head that shares it].

// Positions of a tile at most; every tile has a multiple of PART. Those beyond the last one are rows of zeros.
#define TILE_POSITIONS 512
// What shares are multiplied by, as f16: the largest is 1, and those below 2^-29 lose bits. It leaves with the totals.
#define SHARE_ONE 32768.0f

// Queries of the pass's vectors, a block each, as f16 times a power of two each. `factors` gets what brings a vector's
// products back, and scales them.
extern "C" __global__ void __launch_bounds__(THREADS) attention_queries(const float *q, u16 *out, float *factors,
    u32 heads, u32 shared, u32 size, float scale) {
    u32 j = blockIdx.x, m = gridDim.x, groups = heads * (size / 8);
    const float *from = q + (u64)j * heads * size;
    float peak = 0.0f;
    for (u32 i = threadIdx.x; i < 8 * groups; i += THREADS) {
        peak = fmaxf(peak, fabsf(from[i]));
    }
    Power power = power_of(block_max(peak));
    for (u32 group = threadIdx.x; group < groups; group += THREADS) {
        u32 head = group / (size / 8), element = 8 * (group % (size / 8));
        u64 row = ((u64)(head / shared) * m + j) * shared + head % shared;
        u16 halves[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            halves[i] = half_of_float(from[8 * group + i] * power.inverse);
        }
        store_eight(out + row * size + element, halves);
    }
    if (threadIdx.x == 0) {
        factors[j] = power.scale * scale;
    }
}

DEVICE void halves_of(const Eight<u16> &eight, u16 *halves) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        halves[i] = (u16)(eight.words[i / 2] >> (16 * (i % 2)));
    }
}
DEVICE void halves_of(const Eight<float> &eight, u16 *halves) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        halves[i] = bounded_half(element_of(eight, i));
    }
}

// Keys (y = 0) and values (y = 1) of the positions `begin .. begin + count` of the sequence of vector 0, as f16, and zeros
// up to `columns` positions: [head][position][element], heads `room` positions apart. A lane has eight elements.
template <class T> DEVICE void attention_gather(const Cached &c, u16 *keys, u16 *values, u32 begin, u32 count,
    u32 columns, u32 room) {
    u32 at = blockIdx.x * THREADS + threadIdx.x, groups = c.head_size / 8, row = at / groups, group = at % groups;
    u32 position = row / c.heads, head = row % c.heads;
    if (position >= columns) {
        return;
    }
    u16 halves[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (position < count) {
        u64 from = cached_at(c, 0, blockIdx.y == 0 ? c.keys : c.values, begin + position, head, sizeof(T));
        Eight<T> eight;
        load_elements(followed<T>(from, c.head_size), 8 * group, c.head_size, eight);
        halves_of(eight, halves);
    }
    u16 *to = blockIdx.y == 0 ? keys : values;
    store_eight(to + ((u64)head * room + position) * c.head_size + 8 * group, halves);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_gather_f16(Cached c, u16 *keys, u16 *values, u32 begin,
    u32 count, u32 columns, u32 room) {
    attention_gather<u16>(c, keys, values, begin, count, columns, room);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_gather_f32(Cached c, u16 *keys, u16 *values, u32 begin,
    u32 count, u32 columns, u32 room) {
    attention_gather<float>(c, keys, values, begin, count, columns, room);
}

// Shares of a tile's scores, in their place: a row of `columns` f32 becomes as many f16 and as much room behind them. A
// warp a row (x) of a head of keys and values (y). The tile has the vectors from `first` on, of the pass's m, whose first
// one is at position `past`, and positions from `begin` on. `kept` has of each head of each vector the largest score and
// the sum of the shares so far; where a tile has a larger score, the sums of values so far become smaller.
extern "C" __global__ void __launch_bounds__(THREADS) attention_shares(float *scores, float *sums, float *kept,
    const float *factors, u32 heads, u32 shared, u32 size, u32 m, u32 first, u32 rows, u32 columns, u32 past,
    u32 begin) {
    static_assert(PART == 4 * LANES, "a warp has a part at a time, four positions each lane");
    const u32 parts = TILE_POSITIONS / PART;
    u32 lane = threadIdx.x % LANES, row = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (row >= rows) {
        return;
    }
    u32 j = first + row / shared, end = past + j + 1, seen = end > begin ? end - begin : 0;
    float *from = scores + ((u64)blockIdx.y * rows + row) * columns;
    float *keep = kept + 2 * ((u64)j * heads + blockIdx.y * shared + row % shared);
    float factor = factors[j], before = begin > 0 ? keep[0] : -INFINITE, peak = before, total = 0.0f;
    float mine[4 * parts];
#pragma unroll
    for (u32 n = 0; n < parts; n++) {
        u32 at = n * PART + 4 * lane;
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if (n * PART < columns) {
            four = *(const float4 *)(from + at);
        }
        float elements[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            mine[4 * n + i] = at + i < seen && at + i < columns ? elements[i] * factor : -INFINITE;
            peak = fmaxf(peak, mine[4 * n + i]);
        }
    }
    // Behind this, every lane has read its scores: each waits for what comes of the others'.
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, distance));
    }
#pragma unroll
    for (u32 n = 0; n < parts; n++) {
        u64 four = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float score = mine[4 * n + i];
            u16 share = score == -INFINITE ? 0 : half_of_float(expf(score - peak) * SHARE_ONE);
            four |= (u64)share << (16 * i);
            // What the library multiplies, so that the shares add up to one.
            total += float_of_half(share);
        }
        if (n * PART < columns) {
            *(u64 *)((u16 *)from + n * PART + 4 * lane) = four;
        }
    }
    total = warp_sum(total);
    float smaller = begin > 0 ? expf(before - peak) : 0.0f;
    if (begin > 0 && smaller != 1.0f) {
        float *to = sums + (((u64)blockIdx.y * m + first) * shared + row) * size;
        for (u32 i = lane; i < size; i += LANES) {
            to[i] *= smaller;
        }
    }
    if (lane == 0) {
        keep[1] = (begin > 0 ? keep[1] * smaller : 0.0f) + total;
        keep[0] = peak;
    }
}

// The sums of values over the sums of shares, for the pass's vectors, a block each: [vector][head][element].
extern "C" __global__ void __launch_bounds__(THREADS) attention_result(const float *sums, const float *kept, float *out,
    u32 heads, u32 shared, u32 size) {
    u32 j = blockIdx.x, m = gridDim.x;
    for (u32 i = threadIdx.x; i < heads * size; i += THREADS) {
        u32 head = i / size;
        u64 row = ((u64)(head / shared) * m + j) * shared + head % shared;
        out[(u64)j * heads * size + i] = sums[row * size + i % size] / kept[2 * ((u64)j * heads + head) + 1];
    }
}
