// The kernels of updates for the emulated CUDA driver, with what each reads and writes.

#include "machine.h"

#include "../../cuda/kernels.cu"

namespace emulation {

static void reach_gradients(Reach &r, const Gradients &g) {
    r.reads(g.at, g.at == nullptr ? 0 : g.count * (g.narrow != 0 ? 2 : 4));
}

static void reach_adamw(Reach &r, Adamw a, Gradients g) {
    r.writes(a.p, g.count);
    r.writes(a.m, g.count);
    r.writes(a.v, g.count);
    r.writes(a.working, a.working == nullptr ? 0 : g.count);
    reach_gradients(r, g);
}

static void reach_sgd(Reach &r, Sgd a, Gradients g) {
    r.writes(a.p, g.count);
    r.writes(a.b, a.b == nullptr ? 0 : g.count);
    r.writes(a.working, a.working == nullptr ? 0 : g.count);
    reach_gradients(r, g);
}

static void reach_narrow(Reach &r, const float *from, u16 *to, u64 count) {
    r.reads(from, count);
    r.writes(to, count);
}

static void reach_add_f32(Reach &r, float *to, const float *values, u64 count, float) {
    r.writes(to, count);
    r.reads(values, count);
}

static void reach_add_bf16(Reach &r, u16 *to, const float *values, u64 count, float) {
    r.writes(to, count);
    r.reads(values, count);
}

static u64 chunks(u64 count, u32 head) {
    return count <= head ? 1 : 1 + (count - head + CHUNK - 1) / CHUNK;
}

static void reach_squares_f32(Reach &r, const float *gradients, double *sums, u64 count, u32 head) {
    r.reads(gradients, count);
    r.writes(sums, chunks(count, head));
}

static void reach_squares_bf16(Reach &r, const u16 *gradients, double *sums, u64 count, u32 head) {
    r.reads(gradients, count);
    r.writes(sums, chunks(count, head));
}

static Gradients translated(const Reach &reach, Gradients g) {
    g.at = translated(reach, g.at);
    return g;
}
static Adamw translated(const Reach &reach, Adamw a) {
    a.p = translated(reach, a.p);
    a.m = translated(reach, a.m);
    a.v = translated(reach, a.v);
    a.working = translated(reach, a.working);
    return a;
}
static Sgd translated(const Reach &reach, Sgd a) {
    a.p = translated(reach, a.p);
    a.b = translated(reach, a.b);
    a.working = translated(reach, a.working);
    return a;
}

static const Row TABLE[] = {
    ENTRY(train_interface_1, reach_nothing) ENTRY(train_adamw, reach_adamw) ENTRY(train_sgd, reach_sgd)
    ENTRY(train_narrow, reach_narrow) ENTRY(train_add_f32, reach_add_f32) ENTRY(train_add_bf16, reach_add_bf16)
    ENTRY(train_squares_f32, reach_squares_f32) ENTRY(train_squares_bf16, reach_squares_bf16)
};

}  // namespace emulation

#include "exports.h"
