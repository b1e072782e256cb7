// Updates of parameters in device memory: the same arithmetic as `rule.rs` and `gradients.rs`, to the last bit. Each
// operation is rounded by itself, as on the host. The intrinsics say so, and the scripts that compile this set
// -fmad=false.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void __launch_bounds__(256)
const u32 THREADS = 256;
// Elements of which one sum of squares is made, and the partial sums of it: as in `gradients.rs`.
const u32 CHUNK = 2048;
const u32 PARTIAL = 8;

// Kernels that were compiled from sources with another number may mean something else.
KERNEL train_interface_1() {}

static __device__ __forceinline__ float widened(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

// To the nearest, ties to even; NaN stays NaN.
static __device__ __forceinline__ u16 narrowed(float value) {
    u32 bits = __float_as_uint(value);
    u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (u16)(value != value ? (bits >> 16 | 0x40u) : rounded);
}

// Where a lane's elements begin, and how far the next one is.
static __device__ __forceinline__ u64 first_element() {
    return (u64)blockIdx.x * THREADS + threadIdx.x;
}
static __device__ __forceinline__ u64 stride() {
    return (u64)gridDim.x * THREADS;
}

// Gradients of a launch: `count` of them from `at` on, or none, which are zeros.
struct Gradients {
    const u8 *at;
    u64 count;
    // Whether they are bf16.
    u32 narrow;
    // What each is multiplied by.
    float factor;
};

static __device__ __forceinline__ float gradient(const Gradients &g, u64 i) {
    if (g.at == nullptr) {
        return 0.0f;
    }
    float value = g.narrow != 0 ? widened(((const u16 *)g.at)[i]) : ((const float *)g.at)[i];
    return __fmul_rn(value, g.factor);
}

// `p`, `m`, `v` and the gradients are of `count` elements; `working`, if there is one, gets what comes out as bf16.
struct Adamw {
    float *p, *m, *v;
    u16 *working;
    float kept, weight, second, weight_of_square, size, root, epsilon;
    u32 padding;
};

KERNEL train_adamw(Adamw a, Gradients g) {
    for (u64 i = first_element(); i < g.count; i += stride()) {
        float d = gradient(g, i), m = a.m[i], v = a.v[i];
        m = __fadd_rn(m, __fmul_rn(a.weight, __fsub_rn(d, m)));
        v = __fadd_rn(__fmul_rn(v, a.second), __fmul_rn(__fmul_rn(a.weight_of_square, d), d));
        float below = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), a.root), a.epsilon);
        float p = __fsub_rn(__fmul_rn(a.p[i], a.kept), __fmul_rn(a.size, __fdiv_rn(m, below)));
        a.p[i] = p;
        a.m[i] = m;
        a.v[i] = v;
        if (a.working != nullptr) {
            a.working[i] = narrowed(p);
        }
    }
}

// Without momentum there is no buffer `b`.
struct Sgd {
    float *p, *b;
    u16 *working;
    float rate, decay, momentum;
    u32 padding;
};

KERNEL train_sgd(Sgd a, Gradients g) {
    for (u64 i = first_element(); i < g.count; i += stride()) {
        float p = a.p[i];
        float d = __fadd_rn(gradient(g, i), __fmul_rn(a.decay, p));
        if (a.b != nullptr) {
            d = __fadd_rn(__fmul_rn(a.b[i], a.momentum), d);
            a.b[i] = d;
        }
        p = __fsub_rn(p, __fmul_rn(a.rate, d));
        a.p[i] = p;
        if (a.working != nullptr) {
            a.working[i] = narrowed(p);
        }
    }
}

// `to[i] = from[i]`, as bf16.
KERNEL train_narrow(const float *from, u16 *to, u64 count) {
    for (u64 i = first_element(); i < count; i += stride()) {
        to[i] = narrowed(from[i]);
    }
}

// Adds `values[i] * factor` to gradients.
KERNEL train_add_f32(float *to, const float *values, u64 count, float factor) {
    for (u64 i = first_element(); i < count; i += stride()) {
        to[i] = __fadd_rn(to[i], __fmul_rn(values[i], factor));
    }
}
KERNEL train_add_bf16(u16 *to, const float *values, u64 count, float factor) {
    for (u64 i = first_element(); i < count; i += stride()) {
        to[i] = narrowed(__fadd_rn(widened(to[i]), __fmul_rn(values[i], factor)));
    }
}

// The sum of the squares in each chunk of `count` gradients, of which the first chunk has `head`, and the others CHUNK.
// Eight lanes take every eighth element each.
template <class Element>
static __device__ __forceinline__ void squares_of(const Element *gradients, u64 count, u32 head, double *sums) {
    __shared__ double parts[THREADS];
    u32 lane = threadIdx.x % PARTIAL;
    u64 chunk = (u64)blockIdx.x * (THREADS / PARTIAL) + threadIdx.x / PARTIAL;
    u64 from = chunk == 0 ? 0 : head + (chunk - 1) * CHUNK, to = head + chunk * CHUNK;
    to = to < count ? to : count;
    double sum = 0.0;
    for (u64 i = from + lane; i < to; i += PARTIAL) {
        double value;
        if constexpr (sizeof(Element) == 2) {
            value = widened(gradients[i]);
        } else {
            value = gradients[i];
        }
        sum += value * value;
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && from < count) {
        for (u32 next = 1; next < PARTIAL; next++) {
            sum += parts[threadIdx.x + next];
        }
        sums[chunk] = sum;
    }
}

KERNEL train_squares_f32(const float *gradients, double *sums, u64 count, u32 head) {
    squares_of(gradients, count, head, sums);
}
KERNEL train_squares_bf16(const u16 *gradients, double *sums, u64 count, u32 head) {
    squares_of(gradients, count, head, sums);
}
