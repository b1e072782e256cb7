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

#define WEIGHT_KERNELS(name, Format)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) matvec_##name(const u8 *weights, const float *x, float *out, \
        u32 k, u32 rows, u32 m, u32 stride, u32 accumulate) {                                                          \
        multiply<Format, ROWS, 1>(weights, x, out, k, rows, m, stride, accumulate);                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) matmul_##name(const u8 *weights, const float *x, float *out, \
        u32 k, u32 rows, u32 m, u32 stride, u32 accumulate) {                                                          \
        multiply<Format, 1, VECTORS>(weights, x, out, k, rows, m, stride, accumulate);                                 \
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
