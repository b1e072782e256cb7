// ---- attention: parts of PART positions ----
//
// A part of a vector's positions is summed up by itself, and parts are put together one after the other, from the first
// position on. So the bits of a result depend on the query and on the keys and values up to its position: neither on
// the other vectors of a launch, nor on the blocks that a sequence is in, nor on the grid. One vector's parts are made by
// several blocks (`attention_parts`) and put together by another kernel (`attention_merge`); the vectors of a prompt have
// all of theirs from one block (`attention_prompt`). Both ways are the same operations in the same order.
//
// Keys and values are read once for all heads that share them, up to QUERIES of them.

#define PART 128
#define QUERIES 8
// Queries whose sums of values a lane has at a time.
#define QUERIES_AT_ONCE 4
// Positions whose values a lane requests before it uses the first.
#define VALUES_AHEAD 4
// Lanes that have a key together.
#define LANES_OF_KEY 8

// Shared memory of a block. H is the most elements of a head: 64, 128 or 256.
template <int H> struct alignas(16) Room {
    float queries[QUERIES][H];
    // Scores, then shares.
    float scores[QUERIES][PART];
    float peaks[QUERIES], totals[QUERIES];
    // Where the keys and the values of a part are.
    u64 keys[PART], values[PART];
    // Sums of lanes: of scores [query][position][lane of the key], then of values [group of positions][query][element].
    float sums[THREADS * LANES_OF_KEY * QUERIES_AT_ONCE];
};

// Eight elements as they are in memory.
template <class T> struct Eight {
    u32 words[2 * sizeof(T)];
};

// Eight elements from `element` on; zeros beyond the head.
template <class T> DEVICE void load_elements(const T *row, u32 element, u32 size, Eight<T> &out) {
    const T *from = row + element;
    if (element + 8 <= size && (u64)from % 16 == 0) {
        load_words<2 * sizeof(T)>((const u8 *)from, out.words);
        return;
    }
    // Rarely so; the loop is kept small.
    out = Eight<T>();
#pragma unroll 1
    for (u32 at = 0; at < 8 && element + at < size; at++) {
        u32 bits = bits_of(from[at]) << (at * sizeof(T) % 4 * 8);
#pragma unroll
        for (u32 word = 0; word < 2 * sizeof(T); word++) {
            out.words[word] |= word == at * sizeof(T) / 4 ? bits : 0;
        }
    }
}

template <class T> DEVICE float element_of(const Eight<T> &eight, int i) {
    return sizeof(T) == 2 ? float_of_half((u16)(eight.words[i * sizeof(T) / 4] >> (16 * (i % 2))))
                          : __uint_as_float(eight.words[i * sizeof(T) / 4]);
}

// Of `count` queries in `room.queries` (scaled), the scores and sums over the positions `begin .. begin + PART`, each up
// to its own limit, which `limit` gives: `room.peaks` the largest score, `room.totals` the sum of the shares. For a query
// without a position there, they say so: -INFINITE and 0. `take(query, element, sum)` gets the values by their shares,
// every element of a query once, always by the same lane. Sequence and table are those of vector j.
template <class T, int H, class Limit, class Take>
DEVICE void attend_part(Room<H> &room, const Cached &c, u32 j, u32 head, u32 begin, u32 end, u32 count, Limit limit,
    Take take) {
    u32 t = threadIdx.x, lane = t % LANES, warp = t / LANES;
    u32 seen = min(PART, end - begin);
    if (t < seen) {
        u64 key = cached_at(c, j, c.keys, begin + t, head, sizeof(T));
        u64 value = cached_at(c, j, c.values, begin + t, head, sizeof(T));
        room.keys[t] = (u64)followed<T>(key, c.head_size);
        room.values[t] = (u64)followed<T>(value, c.head_size);
    }
    // Also: queries are there, and what was left of the part before is used.
    __syncthreads();
    // Pieces of a key that a lane has, and positions whose keys it requests before it uses the first.
    const int pieces = H / (8 * LANES_OF_KEY), ahead = pieces * sizeof(T) <= 4 ? 4 : pieces * sizeof(T) <= 8 ? 2 : 1;
    const u32 step = THREADS / LANES_OF_KEY;
    u32 part_of_key = t % LANES_OF_KEY;
#pragma unroll 1
    for (u32 nearest = t / LANES_OF_KEY; nearest < seen; nearest += step * ahead) {
        Eight<T> keys[ahead][pieces];
#pragma unroll
        for (int n = 0; n < ahead; n++) {
            // Beyond the last position, its key is used again: what comes of it is not stored.
            const T *row = (const T *)room.keys[min(nearest + n * step, seen - 1)];
#pragma unroll
            for (int piece = 0; piece < pieces; piece++) {
                load_elements(row, 8 * (part_of_key + piece * LANES_OF_KEY), c.head_size, keys[n][piece]);
            }
        }
#pragma unroll 1
        for (u32 query = 0; query < count; query++) {
            float scores[ahead];
#pragma unroll
            for (int n = 0; n < ahead; n++) {
                scores[n] = 0.0f;
            }
#pragma unroll
            for (int piece = 0; piece < pieces; piece++) {
                const float4 *from = (const float4 *)&room.queries[query][8 * (part_of_key + piece * LANES_OF_KEY)];
                float4 a = from[0], b = from[1];
                float elements[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int n = 0; n < ahead; n++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        scores[n] = fmaf(elements[i], element_of(keys[n][piece], i), scores[n]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < ahead; n++) {
                if (nearest + n * step < seen) {
                    room.sums[(query * PART + nearest + n * step) * LANES_OF_KEY + part_of_key] = scores[n];
                }
            }
        }
    }
    __syncthreads();
    // A warp a query.
    static_assert(QUERIES == WARPS, "a warp has a query's scores");
    if (warp < count) {
        u32 own = limit(warp);
        float mine[PART / LANES], peak = -INFINITE, total = 0.0f;
#pragma unroll
        for (int n = 0; n < PART / LANES; n++) {
            u32 position = lane + n * LANES;
            const float4 *from = (const float4 *)&room.sums[(warp * PART + position) * LANES_OF_KEY];
            mine[n] = -INFINITE;
            if (position < seen && begin + position < own) {
                float4 a = from[0], b = from[1];
                mine[n] = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
            }
            peak = fmaxf(peak, mine[n]);
        }
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, distance));
        }
#pragma unroll
        for (int n = 0; n < PART / LANES; n++) {
            // A query that sees none of the positions has no share in them.
            float share = mine[n] == -INFINITE ? 0.0f : expf(mine[n] - peak);
            room.scores[warp][lane + n * LANES] = share;
            total += share;
        }
        total = warp_sum(total);
        if (lane == 0) {
            room.peaks[warp] = peak;
            room.totals[warp] = total;
        }
    }
    __syncthreads();
    // Lanes of a row of values, and rows at a time.
    const u32 lanes_of_row = H / 8, groups = THREADS / lanes_of_row;
    u32 element = 8 * (t % lanes_of_row), group = t / lanes_of_row;
#pragma unroll 1
    for (u32 first = 0; first < count; first += QUERIES_AT_ONCE) {
        float sums[QUERIES_AT_ONCE][8];
#pragma unroll
        for (int n = 0; n < QUERIES_AT_ONCE * 8; n++) {
            sums[n / 8][n % 8] = 0.0f;
        }
#pragma unroll 1
        for (u32 nearest = group; nearest < seen; nearest += VALUES_AHEAD * groups) {
            Eight<T> values[VALUES_AHEAD];
#pragma unroll
            for (u32 n = 0; n < VALUES_AHEAD; n++) {
                const T *row = (const T *)room.values[min(nearest + n * groups, seen - 1)];
                load_elements(row, element, c.head_size, values[n]);
            }
#pragma unroll
            for (u32 n = 0; n < VALUES_AHEAD; n++) {
                u32 position = nearest + n * groups;
                if (position >= seen) {
                    break;
                }
#pragma unroll
                for (u32 query = 0; query < QUERIES_AT_ONCE; query++) {
                    float share = room.scores[first + query][position];
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        sums[query][i] = fmaf(share, element_of(values[n], i), sums[query][i]);
                    }
                }
            }
        }
#pragma unroll
        for (int query = 0; query < QUERIES_AT_ONCE; query++) {
            float4 *to = (float4 *)&room.sums[(group * QUERIES_AT_ONCE + query) * H + element];
            to[0] = {sums[query][0], sums[query][1], sums[query][2], sums[query][3]};
            to[1] = {sums[query][4], sums[query][5], sums[query][6], sums[query][7]};
        }
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < QUERIES_AT_ONCE * H / THREADS; n++) {
            u32 at = t + n * THREADS, query = at / H;
            float sum = 0.0f;
#pragma unroll 4
            for (u32 g = 0; g < groups; g++) {
                sum += room.sums[g * QUERIES_AT_ONCE * H + at];
            }
            if (first + query < count && at % H < c.head_size) {
                take(first + query, at % H, (first / QUERIES_AT_ONCE) * (QUERIES_AT_ONCE * H / THREADS) + n, sum);
            }
        }
        __syncthreads();
    }
}

// Queries of the launch's vectors, scaled, to shared memory. `of` gives a query's vector and head.
template <int H, class Of>
DEVICE void load_queries(Room<H> &room, const float *q, u32 size, u32 count, float scale, Of of) {
#pragma unroll 1
    for (u32 at = threadIdx.x; at < QUERIES * H; at += THREADS) {
        u32 query = at / H, element = at % H;
        float value = 0.0f;
        if (query < count && element < size) {
            value = __fmul_rn(q[of(query) * size + element], scale);
        }
        room.queries[query][element] = value;
    }
}

struct Attention {
    // [vector][head][element].
    const float *q;
    float *out;
    // What is kept of parts: see the kernels.
    float *kept;
    // Heads of the queries; parts that this launch has, and those that there is room for.
    u32 heads, first, end, parts;
    float scale;
};

// The parts `first .. end` of a vector's positions (z), for the heads that share head y of keys and values. The blocks of
// x take turns; those beyond the vector's position have nothing to do. Of each part and head, `kept` gets the largest
// score, the sum of the shares and the values by their shares: [vector][head][parts][2 + element].
template <class T, int H> DEVICE void attention_parts(const Attention &a, const Cached &c) {
    __shared__ Room<H> room;
    u32 j = blockIdx.z, shared = a.heads / c.heads, end = c.positions[j] + 1;
    for (u32 part = a.first + blockIdx.x; part < a.end && part * PART < end; part += gridDim.x) {
        for (u32 begin = 0; begin < shared; begin += QUERIES) {
            u32 count = min(QUERIES, shared - begin), head = blockIdx.y * shared + begin;
            u64 which = (u64)j * a.heads + head;
            __syncthreads();
            load_queries(room, a.q, c.head_size, count, a.scale, [&](u32 query) { return which + query; });
            float *kept = a.kept;
            u32 row = c.head_size + 2, parts = a.parts;
            attend_part<T, H>(room, c, j, blockIdx.y, part * PART, end, count, [&](u32) { return end; },
                [&](u32 query, u32 element, u32, float sum) {
                    kept[((which + query) * parts + part) * row + 2 + element] = sum;
                });
            if (threadIdx.x < count) {
                float *to = kept + ((which + threadIdx.x) * parts + part) * row;
                to[0] = room.peaks[threadIdx.x];
                to[1] = room.totals[threadIdx.x];
            }
        }
    }
}

// Puts a part to what there is so far.
DEVICE void add_part(float *peak, float *total, float part_peak, float part_total, float *keep, float *share) {
    float higher = fmaxf(*peak, part_peak);
    *keep = expf(*peak - higher);
    *share = expf(part_peak - higher);
    *peak = higher;
    *total = fmaf(*total, *keep, __fmul_rn(part_total, *share));
}

// Puts the parts of each head (x) of a vector (y) together.
extern "C" __global__ void __launch_bounds__(THREADS) attention_merge(Attention a, Cached c) {
    u32 j = blockIdx.y, element = threadIdx.x;
    u64 which = (u64)j * a.heads + blockIdx.x;
    u32 count = c.positions[j] / PART + 1, row = c.head_size + 2;
    if (element >= c.head_size) {
        return;
    }
    float peak = -INFINITE, total = 0.0f, mixed = 0.0f, keep, share;
    const float *from = a.kept + which * a.parts * row;
    for (u32 part = 0; part < count; part++, from += row) {
        add_part(&peak, &total, from[0], from[1], &keep, &share);
        mixed = fmaf(mixed, keep, __fmul_rn(from[2 + element], share));
    }
    a.out[which * c.head_size + element] = mixed / total;
}

// The vectors of a prompt: m of one sequence, at positions that follow one another. A block has as many vectors (x) as
// QUERIES has room for with the heads that share head y of keys and values, and all their parts `first .. end`. Between
// launches for parts that follow one another, `kept` has the largest score and the sum of the shares of each head of each
// vector, and `out` the values by their shares; a head gets its result in the launch with the part of its position.
template <class T, int H> DEVICE void attention_prompt(const Attention &a, const Cached &c) {
    __shared__ Room<H> room;
    __shared__ float peaks[QUERIES], totals[QUERIES], keeps[QUERIES], shares[QUERIES];
    const int MINE = QUERIES * H / THREADS;
    u32 shared = a.heads / c.heads, heads = min(shared, QUERIES), vectors = QUERIES / heads;
    u32 first_vector = blockIdx.x * vectors, count_vectors = min(vectors, c.m - first_vector), t = threadIdx.x;
    u32 base = c.positions[first_vector], last = base + count_vectors;
    for (u32 begin = 0; begin < shared; begin += QUERIES) {
        u32 of_vector = min(heads, shared - begin), count = count_vectors * of_vector;
        auto which = [&](u32 query) {
            return (u64)(first_vector + query / of_vector) * a.heads + blockIdx.y * shared + begin + query % of_vector;
        };
        auto limit = [&](u32 query) { return base + query / of_vector + 1; };
        __syncthreads();
        load_queries(room, a.q, c.head_size, count, a.scale, which);
        float mixed[MINE];
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            u32 query = (t + n * THREADS) / H, element = t % H;
            bool goes_on = a.first > 0 && query < count && element < c.head_size;
            mixed[n] = goes_on ? a.out[which(query) * c.head_size + element] : 0.0f;
        }
        if (t < count) {
            peaks[t] = a.first > 0 ? a.kept[2 * which(t)] : -INFINITE;
            totals[t] = a.first > 0 ? a.kept[2 * which(t) + 1] : 0.0f;
        }
        u32 part = a.first;
        for (; part < a.end && part * PART < last; part++) {
            attend_part<T, H>(room, c, first_vector, blockIdx.y, part * PART, last, count, limit,
                [&](u32 query, u32, u32 n, float sum) {
                    if (part * PART >= limit(query)) {
                        return;
                    }
                    float peak = peaks[query], total = 0.0f, keep, share;
                    add_part(&peak, &total, room.peaks[query], 0.0f, &keep, &share);
#pragma unroll
                    for (int i = 0; i < MINE; i++) {
                        mixed[i] = i == (int)n ? fmaf(mixed[i], keep, __fmul_rn(sum, share)) : mixed[i];
                    }
                });
            if (t < count && part * PART < limit(t)) {
                add_part(&peaks[t], &totals[t], room.peaks[t], room.totals[t], &keeps[t], &shares[t]);
            }
            __syncthreads();
        }
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            u32 query = (t + n * THREADS) / H, element = t % H;
            // Vectors whose position lies before the first part have their results.
            if (query < count && element < c.head_size && limit(query) > a.first * PART) {
                bool ends = limit(query) <= a.end * PART;
                a.out[which(query) * c.head_size + element] = ends ? mixed[n] / totals[query] : mixed[n];
            }
        }
        if (t < count && limit(t) > a.end * PART) {
            a.kept[2 * which(t)] = peaks[t];
            a.kept[2 * which(t) + 1] = totals[t];
        }
    }
}

// Thread blocks at a time on a multiprocessor: for more, ptxas would have too few registers.
#define ATTENTION_OF(kernel, type, T, size, blocks)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) kernel##_##type##_##size(Attention a, Cached c) {    \
        kernel<T, size>(a, c);                                                                                         \
    }
#define EACH_ATTENTION(kernel, few, many)                                                                              \
    ATTENTION_OF(kernel, f16, u16, 64, few)                                                                            \
    ATTENTION_OF(kernel, f16, u16, 128, 2)                                                                             \
    ATTENTION_OF(kernel, f16, u16, 256, many)                                                                          \
    ATTENTION_OF(kernel, f32, float, 64, 2)                                                                            \
    ATTENTION_OF(kernel, f32, float, 128, 2)                                                                           \
    ATTENTION_OF(kernel, f32, float, 256, many)

EACH_ATTENTION(attention_parts, 3, 2)
EACH_ATTENTION(attention_prompt, 2, 1)
