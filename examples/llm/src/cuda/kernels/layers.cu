// ---- between the products ----

// gate = silu(gate) * up, n numbers.
extern "C" __global__ void __launch_bounds__(THREADS) silu_multiply(float *gate, const float *up, u64 n) {
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

// What one number of a cache is: half precision or single.
DEVICE u32 bits_of(u16 half) {
    return half;
}
DEVICE u32 bits_of(float number) {
    return __float_as_uint(number);
}
DEVICE void stored(u16 *to, float number) {
    *to = half_of_float(number);
}
DEVICE void stored(float *to, float number) {
    *to = number;
}

// Where a layer's keys and values are: rows of all heads' elements, in blocks of `block_tokens` positions. Block b of
// sequence s is at table[s * stride + b], of `sequences` sequences; the layer's keys begin `keys` bytes behind that, and
// its values `values` bytes. What changes from token to token is in device memory, so that a captured launch goes on
// being right: the table, and of each vector the sequence that it belongs to (all to the first one where that is null)
// and its position.
struct Cached {
    const u64 *table;
    const u32 *sequence_of;
    const u32 *positions;
    u64 keys, values;
    u32 stride, sequences, block_tokens, heads, head_size, m;
};

// Address of the layer's rows (`part` is `keys` or `values`) at a position, at head `head`, of elements of `size` bytes.
DEVICE u64 cached_at(const Cached &c, u32 j, u64 part, u32 position, u32 head, u32 size) {
    u32 sequence = c.sequence_of != 0 ? c.sequence_of[j] : 0;
    u64 block = c.table[(u64)sequence * c.stride + position / c.block_tokens];
    return block + part + ((u64)(position % c.block_tokens) * c.heads + head) * c.head_size * size;
}

struct Turn {
    // [vector][head][element]; queries are turned in place, keys and values go to the cache.
    float *q;
    const float *k, *v;
    // Weights of norms of each head, or null.
    const u8 *q_norm, *k_norm;
    const float *frequencies;
    u32 heads, q_norm_dtype, k_norm_dtype, pairs, halves;
    float epsilon;
};

// Normalises and turns the queries and keys of a position, and stores its keys and values, a warp each head; vectors are
// the grid's second dimension. Elements (2i, 2i + 1) are a pair, or (i, i + pairs) where `halves` is not 0; what is
// beyond the pairs stays.
template <class T> DEVICE void turn(const Turn &a, const Cached &c) {
    __shared__ float elements[WARPS][256];
    u32 lane = threadIdx.x % LANES, slot = blockIdx.x * WARPS + threadIdx.x / LANES, j = blockIdx.y;
    float *mine = elements[threadIdx.x / LANES];
    u32 position = c.positions[j], size = c.head_size, kv = slot - a.heads;
    bool is_query = slot < a.heads, is_key = !is_query && kv < c.heads;
    bool is_value = !is_query && !is_key && kv < 2 * c.heads;
    const float *from = is_query ? a.q + ((u64)j * a.heads + slot) * size
        : is_key                 ? a.k + ((u64)j * c.heads + kv) * size
                                 : a.v + ((u64)j * c.heads + (kv - c.heads)) * size;
    const u8 *norm = is_query ? a.q_norm : is_key ? a.k_norm : 0;
    u32 norm_dtype = is_query ? a.q_norm_dtype : a.k_norm_dtype;
    if (is_query || is_key || is_value) {
        for (u32 i = lane; i < size; i += LANES) {
            mine[i] = from[i];
        }
    }
    if (norm != 0) {
        float squares = 0.0f;
        for (u32 i = lane; i < size; i += LANES) {
            squares = fmaf(mine[i], mine[i], squares);
        }
        float scale = 1.0f / sqrtf(warp_sum(squares) / (float)size + a.epsilon);
        for (u32 i = lane; i < size; i += LANES) {
            mine[i] = mine[i] * scale * plain_at(norm, norm_dtype, i);
        }
    }
    // A pair may be of two lanes.
    __syncthreads();
    if (is_query || is_key) {
        for (u32 pair = lane; pair < a.pairs; pair += LANES) {
            float sine, cosine;
            sincosf((float)position * a.frequencies[pair], &sine, &cosine);
            u32 first = a.halves != 0 ? pair : 2 * pair, second = first + (a.halves != 0 ? a.pairs : 1);
            float p = mine[first], q = mine[second];
            mine[first] = fmaf(p, cosine, -__fmul_rn(q, sine));
            mine[second] = fmaf(p, sine, __fmul_rn(q, cosine));
        }
    }
    __syncthreads();
    if (is_query) {
        float *to = a.q + ((u64)j * a.heads + slot) * size;
        for (u32 i = lane; i < size; i += LANES) {
            to[i] = mine[i];
        }
    } else if (is_key || is_value) {
        u64 at = is_key ? cached_at(c, j, c.keys, position, kv, sizeof(T))
                        : cached_at(c, j, c.values, position, kv - c.heads, sizeof(T));
        T *to = followed_to_write<T>(at, size);
        for (u32 i = lane; i < size; i += LANES) {
            stored(to + i, mine[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) turn_f16(Turn a, Cached c) {
    turn<u16>(a, c);
}

extern "C" __global__ void __launch_bounds__(THREADS) turn_f32(Turn a, Cached c) {
    turn<float>(a, c);
}

// The embeddings of m tokens: row tokens[j] of `rows` rows of k weights, as numbers; zeros for a token that has none. A
// lane has eight numbers of a vector (y).
extern "C" __global__ void __launch_bounds__(THREADS) embed(u64 weights, const u32 *tokens, float *out, u32 dtype,
    u32 rows, u32 k, u32 m) {
    u32 group = blockIdx.x * THREADS + threadIdx.x, j = blockIdx.y;
    if (8 * group >= k || j >= m) {
        return;
    }
    float w[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (tokens[j] < rows) {
        u64 bytes = bytes_of_row(dtype, k);
        const u8 *row = followed<u8>(weights + tokens[j] * bytes, (u32)bytes);
#define EMBED(name, Format, number)                                                                                    \
    case number:                                                                                                       \
        decode_group<Of<Format, Format::PLAIN> >(row, group, k, w);                                                    \
        break;
        switch (dtype) {
            EACH_FORMAT(EMBED)
        }
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (8 * group + i < k) {
            out[(u64)j * k + 8 * group + i] = w[i];
        }
    }
}
