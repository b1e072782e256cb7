// ---- products: rows of weights times vectors ----
//
// Which bits a result has depends on the row, the vector, and k alone: neither on the number of vectors, nor on the rows
// and matrices of a launch, nor on the block that has the row. Lane t of FEW sums up groups t, t + FEW, .. of eight
// weights, one after the other; each group is summed from its first weight to its last, and then scaled. `block_sums`
// adds up the lanes. A norm's 1 / rms is a factor of the whole sum.

// Lanes of a block of products. k is split over them.
#define FEW 128
// Weights of a row that the lanes have at a time.
#define STAGE (8 * FEW)
// Bytes of the stages of a block: four for 16-bit weights, two for 32-bit ones.
#define STAGES_ROOM (4 * 4 * (2 * STAGE + 32))
// Rows of a block for one vector; for several, half of that, and this many vectors.
#define ROWS_OF_ONE 4
#define ROWS_OF_SEVERAL 2
#define SEVERAL 8
// Floats from one value's partial sums to the next one's: lanes that read one place of each use different banks.
#define PARTIAL (FEW + 8)

// A range of a matrix's rows. `out[j * stride + r]` is the product of row r and vector j.
struct Matrix {
    const u8 *weights;
    // A number for each row, or null.
    const u8 *bias;
    float *out;
    u32 rows, dtype, bias_dtype, stride;
};

// What happens to the products.
#define AFTER_STORE 0
#define AFTER_ADD 1
// Of two matrices of one format: out = silu(first) * second, where the first one's `out` is.
#define AFTER_GATE 2

struct Products {
    // Those without rows are not there.
    Matrix matrices[3];
    // `vectors` vectors of k, of which `rows` names m, or the first m where it is null.
    const float *x;
    const u32 *rows;
    // A norm's weights, or null: each vector is x / rms(x) * norm.
    const u8 *norm;
    u32 norm_dtype;
    float epsilon;
    u32 k, m, vectors, after;
};

// One number of a plain format.
DEVICE float plain_at(const u8 *from, u32 dtype, u32 index) {
    if (dtype == 0) {
        return F32::one(from + (u64)index * F32::PLAIN);
    }
    return dtype == 1 ? F16::one(from + (u64)index * F16::PLAIN) : BF16::one(from + (u64)index * BF16::PLAIN);
}

// Numbers 8 * group .. 8 * group + 8 of k plain ones; zeros beyond.
DEVICE void plain_group(const u8 *from, u32 dtype, u32 group, u32 k, float *out) {
    if (dtype == 0) {
        decode_group<F32>(from, group, k, out);
    } else if (dtype == 1) {
        decode_group<F16>(from, group, k, out);
    } else {
        decode_group<BF16>(from, group, k, out);
    }
}

// Adds up N values over the FEW lanes, in shared memory of N * PARTIAL floats, and leaves the sums in `out`. Eight lanes
// have a sum, each every eighth part of it, whatever N is. All of the block see `out` after the next barrier.
template <int N> DEVICE void block_sums(const float *values, float *partial, float *out) {
    u32 t = threadIdx.x;
#pragma unroll
    for (int n = 0; n < N; n++) {
        partial[n * PARTIAL + t] = values[n];
    }
    __syncthreads();
    // Whole warps, for the shuffles.
    const u32 lanes = (8 * N + LANES - 1) / LANES * LANES;
    if (t < lanes) {
        const float *from = partial + min(t / 8, N - 1) * PARTIAL + t % 8;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW / 8; i++) {
            sum += from[8 * i];
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (t % 8 == 0 && t / 8 < N) {
            out[t / 8] = sum;
        }
    }
}

// Of a format, in bytes: a stage of a row, and the room for it beside what else its pieces of 16 bytes have.
struct Layout {
    u32 stage, slice;
    bool least;
};

DEVICE Layout layout_of(u32 dtype) {
    u32 stage = (u32)bytes_of_row(dtype, STAGE);
    Layout layout = {stage, stage / 16 * 16 + 32, false};
#define LAYOUT(name, Format, number)                                                                                   \
    case number:                                                                                                       \
        layout.least = Format::LEAST != 0;                                                                             \
        break;
    switch (dtype) {
        EACH_FORMAT(LAYOUT)
    }
    return layout;
}

// Requests what a row, of `row_bytes` bytes at `row`, has from byte `start` on, at most a stage of it, in whole pieces of
// 16 bytes: the first and the last one may have bytes beside the row, but lie in the pages that the row is in. In `to`,
// which is aligned, a byte has the place that it has in its piece. So the alignment of a row costs nothing but the bytes
// beside it.
DEVICE void request(const u8 *row, u64 row_bytes, u64 start, u32 stage, u8 *to) {
    u32 length = (u32)(row_bytes - start < stage ? row_bytes - start : stage);
    u32 skipped = (u32)((u64)(row + start) % 16);
    const u8 *from = row + start - skipped;
    for (u32 at = 16 * threadIdx.x; at < skipped + length; at += 16 * FEW) {
        copy_async(to + at, from + at);
    }
}

// The weights of one group of R rows, whose stages are at `from`: those of this lane, of `left` weights that are left.
template <class Format, int R>
DEVICE void unpack_rows(const u8 *const *from, u32 left, float (*w)[8], float *scale, float *least) {
    typedef Of<Format, Format::PLAIN> F;
    const u32 parts = F::ELEMENTS / 8;
    u32 t = threadIdx.x;
#pragma unroll
    for (int r = 0; r < R; r++) {
        F::unpack(from[r] + t / parts * F::BYTES, t % parts, w[r], &scale[r], &least[r]);
#pragma unroll
        for (u32 i = 0; i < 8 && F::PLAIN != 0; i++) {
            // What lies behind the row may be no number.
            w[r][i] = i < left ? w[r][i] : 0.0f;
        }
    }
}

// Adds this lane's part of the products of R rows and M vectors to `sums`. `vectors` has the vectors' addresses, null
// for those that are not there. `stages` is shared memory of STAGES_ROOM bytes. There is one copy of everything but
// `unpack_rows`, which the switch chooses once a stage.
template <int R, int M>
DEVICE void sum_rows(u32 dtype, const u8 *const *rows, const float *const *vectors, const Products &p, u8 *stages,
    float *sums) {
    const Layout layout = layout_of(dtype);
    const u64 row_bytes = bytes_of_row(dtype, p.k);
    // Four stages where they fit, otherwise two: one is used while the others come.
    const u32 depth = 4 * R * layout.slice <= STAGES_ROOM ? 4 : 2;
    u32 t = threadIdx.x, count = (p.k + STAGE - 1) / STAGE;
#pragma unroll 1
    for (u32 stage = 0; stage < depth - 1; stage++) {
#pragma unroll
        for (int r = 0; r < R && stage < count; r++) {
            request(rows[r], row_bytes, (u64)stage * layout.stage, layout.stage, stages + (stage * R + r) * layout.slice);
        }
        copies_commit();
    }
#pragma unroll 1
    for (u32 stage = 0; stage < count; stage++) {
        if (depth == 4) {
            copies_wait<2>();
        } else {
            copies_wait<0>();
        }
        // Behind this barrier all lanes have their copies, and have used the stage before.
        __syncthreads();
        u32 next = stage + depth - 1;
#pragma unroll
        for (int r = 0; r < R && next < count; r++) {
            request(rows[r], row_bytes, (u64)next * layout.stage, layout.stage,
                stages + (next % depth * R + r) * layout.slice);
        }
        copies_commit();
        u32 group = stage * FEW + t;
        if (8 * group >= p.k) {
            continue;
        }
        const u8 *from[R];
        float w[R][8], scale[R], least[R], norm[8];
#pragma unroll
        for (int r = 0; r < R; r++) {
            u32 skipped = (u32)((u64)(rows[r] + (u64)stage * layout.stage) % 16);
            from[r] = stages + (stage % depth * R + r) * layout.slice + skipped;
            scale[r] = 1.0f;
            least[r] = 0.0f;
        }
#define UNPACK_ROWS(name, Format, number)                                                                              \
    case number:                                                                                                       \
        unpack_rows<Format, R>(from, p.k - 8 * group, w, scale, least);                                                \
        break;
        switch (dtype) {
            EACH_FORMAT(UNPACK_ROWS)
        }
        if (p.norm != 0) {
            plain_group(p.norm, p.norm_dtype, group, p.k, norm);
        }
#pragma unroll
        for (int j = 0; j < M; j++) {
            if (vectors[j] == 0) {
                break;
            }
            float y[8], all = 0.0f;
            load_activations(vectors[j], group, p.k, y);
            if (p.norm != 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    y[i] = __fmul_rn(y[i], norm[i]);
                }
            }
            if (layout.least) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    all += y[i];
                }
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
                float sum = 0.0f, *to = &sums[r * M + j];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum = fmaf(w[r][i], y[i], sum);
                }
                *to = fmaf(scale[r], sum, *to);
                if (layout.least) {
                    *to = fmaf(least[r], all, *to);
                }
            }
        }
    }
}

struct alignas(16) Stages {
    u8 bytes[STAGES_ROOM];
};

// The block of the products of R rows (x) and M vectors (y).
template <int R, int M> DEVICE void products(const Products &p) {
    __shared__ Stages stages;
    __shared__ float partial[M * PARTIAL], squares[M], sums[R * M];
    __shared__ const float *vectors[M];
    u32 t = threadIdx.x, first = blockIdx.y * M, block = blockIdx.x;
    // The matrix, and its first row here. Of a gate, rows of the two matrices take turns.
    const u32 each = p.after == AFTER_GATE ? R / 2 : R;
    u32 which = 0;
    while (which < 2 && block >= (p.matrices[which].rows + each - 1) / each) {
        block -= (p.matrices[which].rows + each - 1) / each;
        which++;
    }
    const Matrix &matrix = p.matrices[which];
    u32 row = block * each;
    if (row >= matrix.rows) {
        return;
    }
    u64 row_bytes = bytes_of_row(matrix.dtype, p.k);
    const u8 *rows[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        // Beyond the last row, the last row is used again: its sums are not stored.
        if (p.after == AFTER_GATE) {
            rows[r] = p.matrices[r % 2].weights + min(row + r / 2, matrix.rows - 1) * row_bytes;
        } else {
            rows[r] = matrix.weights + min(row + r, matrix.rows - 1) * row_bytes;
        }
    }
    if (t < M) {
        u32 j = first + t;
        vectors[t] = j < p.m ? p.x + (u64)(p.rows != 0 ? p.rows[j] : j) * p.k : 0;
    }
    __syncthreads();
    if (p.norm != 0) {
        float mine[M];
#pragma unroll
        for (int j = 0; j < M; j++) {
            mine[j] = 0.0f;
            for (u32 group = t; vectors[j] != 0 && 8 * group < p.k; group += FEW) {
                float y[8];
                load_activations(vectors[j], group, p.k, y);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    mine[j] = fmaf(y[i], y[i], mine[j]);
                }
            }
        }
        block_sums<M>(mine, partial, squares);
    }
    float mine[R * M];
#pragma unroll
    for (int n = 0; n < R * M; n++) {
        mine[n] = 0.0f;
    }
    sum_rows<R, M>(matrix.dtype, rows, vectors, p, stages.bytes, mine);
    // All have used their stages, whose memory is used again.
    __syncthreads();
    block_sums<R * M>(mine, (float *)stages.bytes, sums);
    __syncthreads();
    if (t >= R * M) {
        return;
    }
    u32 r = t / M, j = t % M, to = row + r;
    float factor = p.norm != 0 && vectors[j] != 0 ? 1.0f / sqrtf(squares[j] / (float)p.k + p.epsilon) : 1.0f;
    float sum = __fmul_rn(sums[t], factor);
    if (p.after == AFTER_GATE) {
        to = row + r;
        if (r >= R / 2) {
            return;
        }
        float gate = __fmul_rn(sums[2 * r * M + j], factor), up = __fmul_rn(sums[(2 * r + 1) * M + j], factor);
        if (to < matrix.rows && p.matrices[0].bias != 0) {
            gate += plain_at(p.matrices[0].bias, p.matrices[0].bias_dtype, to);
        }
        if (to < matrix.rows && p.matrices[1].bias != 0) {
            up += plain_at(p.matrices[1].bias, p.matrices[1].bias_dtype, to);
        }
        sum = gate / (1.0f + expf(-gate)) * up;
    } else if (to < matrix.rows && matrix.bias != 0) {
        sum += plain_at(matrix.bias, matrix.bias_dtype, to);
    }
    if (to < matrix.rows && vectors[j] != 0) {
        float *at = matrix.out + (u64)(first + j) * matrix.stride + to;
        *at = p.after == AFTER_ADD ? *at + sum : sum;
    }
}

extern "C" __global__ void __launch_bounds__(FEW, 5) products_1(Products p) {
    products<ROWS_OF_ONE, 1>(p);
}

extern "C" __global__ void __launch_bounds__(FEW, 5) products_8(Products p) {
    products<ROWS_OF_SEVERAL, SEVERAL>(p);
}
