// Runs the kernels' source on the CPU for the emulated CUDA driver (tests/fake-cuda): fibers, the table of kernels with
// what each reads and writes, and their registration.

#include <dlfcn.h>
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulation.h"

#include "../../src/cuda/kernels.cu"

namespace emulation {

// ---- fibers ----

const size_t STACK_BYTES = 64 << 10;
const unsigned WARP = 32;

[[noreturn]] static void fail(const char *what) {
    fprintf(stderr, "emulated kernel: %s\n", what);
    abort();
}

// Lanes that wait for each other, and go on when as many have come as are expected.
struct Meeting {
    unsigned expected, arrived;
    uint64_t number;
};

struct Warp {
    Meeting meeting;
    // What the lanes exchange, in two slots that take turns, and in which exchange each was left. Before a lane can
    // come to the next exchange but one, all lanes have read this one.
    uint64_t slots[2][WARP];
    unsigned left_in[2][WARP];
};

struct Fiber {
    Lane lane;
    jmp_buf at;
    ucontext_t start;
    std::vector<char> stack;
    bool started, ended;
    unsigned index, exchanges;
    Fiber *next;
    // Copies that are on their way, and how many belong to each commit: the last one's are not committed yet.
    std::vector<std::pair<void *, const void *>> copies;
    std::vector<size_t> commits;
};

Lane *lane;
Dim block, grid;

static std::vector<Fiber *> fibers;
static std::vector<Warp> warps;
static Meeting everyone;
static unsigned living;
// How often lanes gave way since something last happened.
static unsigned idle;
static jmp_buf caller;
static void (*kernel)(void *);
static void *arguments;

[[noreturn]] static void resume(Fiber *fiber) {
    lane = &fiber->lane;
    if (fiber->started) {
        _longjmp(fiber->at, 1);
    }
    fiber->started = true;
    setcontext(&fiber->start);
    fail("a fiber could not be started");
}

// The next lane of the block that has not ended; this one, if it is the last.
static Fiber *successor(const Fiber *fiber) {
    Fiber *next = fiber->next;
    while (next->ended) {
        next = next->next;
    }
    return next;
}

static void give_way() {
    Fiber *self = lane->fiber;
    if (++idle > 4 * fibers.size() + 4) {
        fail("lanes wait for each other: a barrier that not all of a block reach, or a shuffle that not all of a warp reach");
    }
    if (_setjmp(self->at) == 0) {
        resume(successor(self));
    }
}

static void release(Meeting &meeting) {
    meeting.arrived = 0;
    meeting.number++;
    idle = 0;
}

static void meet(Meeting &meeting) {
    uint64_t number = meeting.number;
    if (++meeting.arrived == meeting.expected) {
        release(meeting);
        return;
    }
    while (meeting.number == number) {
        give_way();
    }
}

static void leave(Meeting &meeting) {
    if (--meeting.expected == meeting.arrived && meeting.arrived > 0) {
        release(meeting);
    }
}

void barrier() {
    meet(everyone);
}

uint64_t exchange(unsigned mask, uint64_t mine, int distance) {
    Fiber *self = lane->fiber;
    Warp &warp = warps[self->index / WARP];
    unsigned index = self->index % WARP, other = index ^ (unsigned)distance;
    if (mask != 0xffffffffu) {
        fail("only shuffles of whole warps are emulated");
    }
    unsigned number = ++self->exchanges, turn = number % 2;
    warp.slots[turn][index] = mine;
    warp.left_in[turn][index] = number;
    meet(warp.meeting);
    if (warp.left_in[turn][other] != number) {
        fail("a shuffle reads a lane that takes no part in it");
    }
    return warp.slots[turn][other];
}

void copy_later(void *to, const void *from) {
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0) {
        fail("a copy of 16 bytes that are not aligned");
    }
    lane->fiber->copies.push_back({to, from});
}

void commit() {
    Fiber *self = lane->fiber;
    size_t before = 0;
    for (size_t count : self->commits) {
        before += count;
    }
    self->commits.push_back(self->copies.size() - before);
}

void wait(unsigned pending) {
    Fiber *self = lane->fiber;
    while (self->commits.size() > pending) {
        size_t count = self->commits.front();
        for (size_t i = 0; i < count; i++) {
            memcpy(self->copies[i].first, self->copies[i].second, 16);
        }
        self->copies.erase(self->copies.begin(), self->copies.begin() + (ptrdiff_t)count);
        self->commits.erase(self->commits.begin());
    }
}

// Every fiber's whole life: a lane of one block after another.
static void run_lane() {
    for (;;) {
        kernel(arguments);
        Fiber *self = lane->fiber;
        if (!self->copies.empty()) {
            fail("a lane ends while its copies are on their way");
        }
        self->commits.clear();
        Warp &warp = warps[self->index / WARP];
        self->ended = true;
        leave(everyone);
        leave(warp.meeting);
        idle = 0;
        bool last = --living == 0;
        if (_setjmp(self->at) == 0) {
            if (last) {
                _longjmp(caller, 1);
            }
            resume(successor(self));
        }
    }
}

static Fiber *new_fiber(unsigned index) {
    Fiber *fiber = new Fiber();
    fiber->stack.resize(STACK_BYTES);
    fiber->lane.fiber = fiber;
    fiber->index = index;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.data();
    // The stacks' distances are not powers of two, or what all lanes have on them would share a few lines of the cache.
    fiber->start.uc_stack.ss_size = STACK_BYTES - index % 61 * 192;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, run_lane, 0);
    return fiber;
}

static void run_block(unsigned threads) {
    unsigned count = (threads + WARP - 1) / WARP;
    warps.assign(count, Warp());
    for (unsigned i = 0; i < threads; i++) {
        Fiber *fiber = fibers[i];
        fiber->lane.thread = {i, 0, 0};
        fiber->ended = false;
        fiber->exchanges = 0;
        fiber->next = fibers[(i + 1) % threads];
        warps[i / WARP].meeting.expected++;
    }
    everyone = {threads, 0, 0};
    living = threads;
    idle = 0;
    if (_setjmp(caller) == 0) {
        resume(fibers[0]);
    }
}

// ---- addresses that a kernel reads from memory ----

// Ranges that the driver has allowed the running launch, by their starts, and where they are on the host.
struct Reached {
    uint64_t bytes;
    bool write;
    uintptr_t at;
};
static std::map<uint64_t, Reached> reached;
// What a kernel that follows a wrong address reads and writes instead, so that the launch ends with the driver's finding
// alone.
static std::vector<char> nowhere;

static uintptr_t (*touch)(uint64_t, uint64_t, bool);

uintptr_t follow(uint64_t address, uint64_t bytes, bool write) {
    auto known = reached.find(address);
    if (known != reached.end() && known->second.bytes >= bytes && (known->second.write || !write)) {
        return known->second.at;
    }
    uintptr_t at = touch(address, bytes, write);
    if (at == 0) {
        nowhere.resize(nowhere.size() < bytes ? bytes : nowhere.size());
        return (uintptr_t)nowhere.data();
    }
    reached[address] = {bytes, write, at};
    return at;
}

static void run_grid(Dim size, Dim threads, void (*what)(void *), void *with) {
    static std::mutex one;
    std::lock_guard<std::mutex> only(one);
    if (threads.y != 1 || threads.z != 1) {
        fail("only blocks of one dimension are emulated");
    }
    grid = size;
    reached.clear();
    while (fibers.size() < threads.x) {
        fibers.push_back(new_fiber((unsigned)fibers.size()));
    }
    kernel = what;
    arguments = with;
    for (block.z = 0; block.z < grid.z; block.z++) {
        for (block.y = 0; block.y < grid.y; block.y++) {
            for (block.x = 0; block.x < grid.x; block.x++) {
                run_block(threads.x);
            }
        }
    }
}

// ---- half precision ----

static float widen(unsigned short half) {
    int exponent = half >> 10 & 31;
    float magnitude = exponent == 0 ? std::ldexp((float)(half & 1023), -24)
        : exponent < 31             ? std::ldexp((float)(1024 + (half & 1023)), exponent - 25)
        : (half & 1023) != 0        ? NAN
                                    : (float)HUGE_VAL;
    return half >> 15 != 0 ? -magnitude : magnitude;
}

float float_of_half(unsigned short half) {
    static const std::vector<float> all = [] {
        std::vector<float> values(1 << 16);
        for (unsigned i = 0; i < values.size(); i++) {
            values[i] = widen((unsigned short)i);
        }
        return values;
    }();
    return all[half];
}

unsigned short half_of_float(float value) {
    unsigned short sign = (unsigned short)(std::signbit(value) ? 0x8000 : 0);
    float magnitude = std::fabs(value);
    if (std::isnan(value)) {
        return sign | 0x7e00;
    }
    // 65520 is halfway between the largest number and what would follow it.
    if (magnitude >= 65520.0f) {
        return sign | 0x7c00;
    }
    // Zero has no exponent that frexp could give.
    if (magnitude == 0.0f) {
        return sign;
    }
    int exponent;
    std::frexp(magnitude, &exponent);
    // The distance of neighbours at this magnitude; nearbyint rounds ties to even.
    int unit = exponent - 11 > -24 ? exponent - 11 : -24;
    unsigned steps = (unsigned)std::nearbyint(std::ldexp(magnitude, -unit));
    return sign | (unsigned short)(unit == -24 ? steps : ((unsigned)(unit + 24) << 10) + steps);
}

// ---- what the kernels read and write ----

typedef struct {
    uint32_t grid[3], threads[3], shared, count;
    const uint8_t *const *parameters;
    const size_t *sizes;
} Launch;

struct Range {
    const void *start;
    uint64_t bytes;
    bool write;
};

// The ranges of a launch.
struct Reach {
    std::vector<Range> ranges;
    template <class T> void reads(const T *start, uint64_t count) {
        ranges.push_back({start, count * sizeof(T), false});
    }
    template <class T> void writes(T *start, uint64_t count) {
        ranges.push_back({start, count * sizeof(T), true});
    }
};

static uint64_t row_bytes(const char *format, uint64_t k) {
    struct {
        const char *name;
        uint64_t elements, bytes;
    } all[] = {{"f32", 1, 4}, {"f16", 1, 2}, {"bf16", 1, 2}, {"q4_0", 32, 18}, {"q4_1", 32, 20}, {"q5_0", 32, 22},
        {"q5_1", 32, 24}, {"q8_0", 32, 34}, {"q2_k", 256, 84}, {"q3_k", 256, 110}, {"q4_k", 256, 144},
        {"q5_k", 256, 176}, {"q6_k", 256, 210}};
    for (auto &one : all) {
        if (strcmp(one.name, format) == 0) {
            return k / one.elements * one.bytes;
        }
    }
    fail("a format without a size");
}

// Blocks of the launch that this thread looks at (x, y): some kernels have one for each vector.
static thread_local unsigned blocks, rows_of_blocks;

static void reach_nothing(Reach &) {}

static void reach_decode(Reach &r, const u8 *row, float *out, u32 dtype, u32 k) {
    r.reads(row, bytes_of_row(dtype, k));
    r.writes(out, k);
}

static void reach_products(Reach &r, Products p) {
    for (u32 i = 0; i < (p.after == AFTER_GATE ? 2 : 3); i++) {
        const Matrix &matrix = p.matrices[i];
        r.reads(matrix.weights, matrix.rows * bytes_of_row(matrix.dtype, p.k));
        r.reads(matrix.bias, matrix.bias == nullptr ? 0 : bytes_of_row(matrix.bias_dtype, matrix.rows));
        // Vector by vector, because what lies between belongs to other rows.
        for (u32 j = 0; j < p.m && (i == 0 || p.after != AFTER_GATE); j++) {
            r.writes(matrix.out + (u64)j * matrix.stride, matrix.rows);
        }
    }
    r.reads(p.norm, p.norm == nullptr ? 0 : bytes_of_row(p.norm_dtype, p.k));
    r.reads(p.rows, p.rows == nullptr ? 0 : p.m);
    r.reads(p.x, (u64)(p.rows == nullptr ? p.m : p.vectors) * p.k);
}

static void reach_cached(Reach &r, const Cached &c) {
    r.reads(c.table, (u64)c.sequences * c.stride);
    r.reads(c.sequence_of, c.sequence_of == nullptr ? 0 : c.m);
    r.reads(c.positions, c.m);
}

static void reach_turn(Reach &r, Turn a, Cached c) {
    reach_cached(r, c);
    r.writes(a.q, (u64)c.m * a.heads * c.head_size);
    r.reads(a.k, (u64)c.m * c.heads * c.head_size);
    r.reads(a.v, (u64)c.m * c.heads * c.head_size);
    r.reads(a.q_norm, a.q_norm == nullptr ? 0 : bytes_of_row(a.q_norm_dtype, c.head_size));
    r.reads(a.k_norm, a.k_norm == nullptr ? 0 : bytes_of_row(a.k_norm_dtype, c.head_size));
    r.reads(a.frequencies, a.pairs);
}

// The rows of weights are followed.
static void reach_embed(Reach &r, u64, const u32 *tokens, float *out, u32, u32, u32 k, u32 m) {
    r.reads(tokens, m);
    r.writes(out, (u64)m * k);
}

static void reach_attention_parts(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, (u64)c.m * a.heads * c.head_size);
    r.writes(a.kept, (u64)c.m * a.heads * a.parts * (c.head_size + 2));
    r.reads(a.out, 0);
}

static void reach_attention_merge(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, 0);
    r.reads(a.kept, (u64)c.m * a.heads * a.parts * (c.head_size + 2));
    r.writes(a.out, (u64)c.m * a.heads * c.head_size);
}

static void reach_attention_prompt(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, (u64)c.m * a.heads * c.head_size);
    r.writes(a.kept, (u64)c.m * a.heads * 2);
    r.writes(a.out, (u64)c.m * a.heads * c.head_size);
}

static void reach_choose(Reach &r, const float *logits, const Draw *draws, u32 *tokens, u32 *positions, u32 *said, u32 n,
    u32 ring) {
    r.reads(logits, (u64)blocks * n);
    r.reads(draws, blocks);
    r.writes(tokens, blocks);
    r.writes(positions, blocks);
    r.writes(said, (u64)blocks * ring);
}

static void reach_silu_multiply(Reach &r, float *gate, const float *up, u64 n) {
    r.writes(gate, n);
    r.reads(up, n);
}

// Rows of `ld` numbers, all of which are written.
#define TILE_OF_FORMAT(name, Format, number)                                                                           \
    static void reach_tile_##name(Reach &r, const u8 *weights, u16 *out, u32 k, u32 rows, u32 ld) {                    \
        r.reads(weights, rows * row_bytes(#name, k));                                                                  \
        r.writes(out, (u64)rows * ld);                                                                                 \
    }

EACH_FORMAT(TILE_OF_FORMAT)

static void reach_halves_f16(Reach &r, const float *x, const u8 *norm, u16 *out, float *scales, u32 norm_dtype, float,
    u32 k, u32 ld) {
    r.reads(x, (u64)blocks * k);
    r.reads(norm, norm != nullptr ? bytes_of_row(norm_dtype, k) : 0);
    r.writes(out, (u64)blocks * ld);
    r.writes(scales, blocks);
}

static void reach_halves_bf16(Reach &r, const float *x, const u8 *norm, u16 *out, u32 norm_dtype, float, u32 k,
    u32 ld) {
    r.reads(x, (u64)blocks * k);
    r.reads(norm, norm != nullptr ? bytes_of_row(norm_dtype, k) : 0);
    r.writes(out, (u64)blocks * ld);
}

static void reach_unscale(Reach &r, const float *products, const float *scales, const u8 *bias, float *out,
    u32 bias_dtype, u32 n, u32 pitch, u32 stride, u32) {
    for (unsigned j = 0; j < rows_of_blocks; j++) {
        r.reads(products + (u64)j * pitch, n);
        r.writes(out + (u64)j * stride, n);
    }
    r.reads(scales, scales != nullptr ? rows_of_blocks : 0);
    r.reads(bias, bias != nullptr ? bytes_of_row(bias_dtype, n) : 0);
}

static void reach_attention_queries(Reach &r, const float *q, u16 *out, float *factors, u32 heads, u32, u32 size,
    float) {
    r.reads(q, (u64)blocks * heads * size);
    r.writes(out, (u64)blocks * heads * size);
    r.writes(factors, blocks);
}

static void reach_attention_gather(Reach &r, Cached c, u16 *keys, u16 *values, u32, u32, u32 columns, u32 room) {
    reach_cached(r, c);
    r.writes(keys, ((u64)(c.heads - 1) * room + columns) * c.head_size);
    r.writes(values, ((u64)(c.heads - 1) * room + columns) * c.head_size);
}

static void reach_attention_shares(Reach &r, float *scores, float *sums, float *kept, const float *factors, u32 heads,
    u32, u32 size, u32 m, u32, u32 rows, u32 columns, u32, u32) {
    r.writes(scores, (u64)rows_of_blocks * rows * columns);
    r.writes(sums, (u64)m * heads * size);
    r.writes(kept, (u64)m * heads * 2);
    r.reads(factors, m);
}

static void reach_attention_result(Reach &r, const float *sums, const float *kept, float *out, u32 heads, u32,
    u32 size) {
    r.reads(sums, (u64)blocks * heads * size);
    r.reads(kept, (u64)blocks * heads * 2);
    r.writes(out, (u64)blocks * heads * size);
}

// ---- the table ----

typedef void (*Declare)(const Launch *, void *, size_t);
typedef void (*Run)(const Launch *, size_t);

static void (*declare_range)(void *, uint64_t, uint64_t, bool);
static uintptr_t (*pointer_to)(uint64_t, uint64_t, bool);

template <class T> static T parameter(const Launch *launch, size_t index) {
    if (index >= launch->count || launch->sizes[index] != sizeof(T)) {
        fail("a launch with other parameters than the kernel's");
    }
    T value;
    memcpy(&value, launch->parameters[index], sizeof value);
    return value;
}

// Where a pointer of a launch leads on the host: to the start of one of its ranges.
template <class T> static T *translated(const Reach &reach, T *pointer) {
    // A range that is written may be read.
    const Range *found = nullptr;
    for (const Range &range : reach.ranges) {
        if (range.start == pointer && (found == nullptr || range.write)) {
            found = &range;
        }
    }
    if (found == nullptr) {
        fail("a pointer of a launch begins none of its ranges");
    }
    if (found->bytes == 0) {
        return nullptr;
    }
    uintptr_t at = pointer_to((uint64_t)pointer, found->bytes, found->write);
    if (at == 0) {
        fail("the driver refuses a range that was declared");
    }
    return (T *)at;
}
template <class T> static T translated(const Reach &, T value) {
    return value;
}
static Products translated(const Reach &reach, Products p) {
    for (Matrix &matrix : p.matrices) {
        if (matrix.rows != 0) {
            matrix.weights = translated(reach, matrix.weights);
            matrix.bias = translated(reach, matrix.bias);
            matrix.out = p.after == AFTER_GATE && &matrix != p.matrices ? nullptr : translated(reach, matrix.out);
        }
    }
    p.norm = translated(reach, p.norm);
    p.rows = translated(reach, p.rows);
    p.x = translated(reach, p.x);
    return p;
}
static Cached translated(const Reach &reach, Cached c) {
    c.table = translated(reach, c.table);
    c.sequence_of = translated(reach, c.sequence_of);
    c.positions = translated(reach, c.positions);
    return c;
}
static Turn translated(const Reach &reach, Turn a) {
    a.q = translated(reach, a.q);
    a.k = translated(reach, a.k);
    a.v = translated(reach, a.v);
    a.q_norm = translated(reach, a.q_norm);
    a.k_norm = translated(reach, a.k_norm);
    a.frequencies = translated(reach, a.frequencies);
    return a;
}
static Attention translated(const Reach &reach, Attention a) {
    a.q = translated(reach, a.q);
    a.kept = translated(reach, a.kept);
    a.out = translated(reach, a.out);
    return a;
}
template <class... A> struct Calls {
    template <size_t... I> static std::tuple<A...> unpack([[maybe_unused]] const Launch *launch,
        std::index_sequence<I...>) {
        return std::tuple<A...>(parameter<A>(launch, I)...);
    }
    static std::tuple<A...> parameters(const Launch *launch) {
        blocks = launch->grid[0];
        rows_of_blocks = launch->grid[1];
        return unpack(launch, std::index_sequence_for<A...>());
    }
    template <void (*REACH)(Reach &, A...)> static Reach reach(const std::tuple<A...> &with) {
        Reach reach;
        std::apply([&](A... all) { REACH(reach, all...); }, with);
        return reach;
    }
    static std::string sizes() {
        std::string text;
        [[maybe_unused]] auto append = [&](size_t size) {
            text += std::string(text.empty() ? "" : ", ") + ".param .align 8 .b8 p[" + std::to_string(size) + "]";
        };
        (append(sizeof(A)), ...);
        return text;
    }
};

template <class F> struct Kind;
template <class... A> struct Kind<void (*)(A...)> : Calls<A...> {};

template <auto KERNEL, auto REACH> struct Entry {
    typedef Kind<decltype(KERNEL)> Of;
    static inline std::atomic<bool> ran{false};
    static void declare(const Launch *launch, void *sink, size_t) {
        auto with = Of::parameters(launch);
        for (const Range &range : Of::template reach<REACH>(with).ranges) {
            declare_range(sink, (uint64_t)range.start, range.bytes, range.write);
        }
    }
    static void run(const Launch *launch, size_t) {
        ran = true;
        auto with = Of::parameters(launch);
        Reach reach = Of::template reach<REACH>(with);
        auto here = std::apply([&](auto... all) { return std::make_tuple(translated(reach, all)...); }, with);
        Dim grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
        Dim threads = {launch->threads[0], launch->threads[1], launch->threads[2]};
        auto call = [](void *all) { std::apply(KERNEL, *(decltype(here) *)all); };
        run_grid(grid, threads, call, &here);
    }
};

struct Row {
    const char *name;
    Declare declare;
    Run run;
    std::string (*sizes)();
    std::atomic<bool> *ran;
};

#define NAME(kernel) #kernel
#define ENTRY(kernel, reach)                                                                                           \
    {NAME(kernel), Entry<&kernel, &reach>::declare, Entry<&kernel, &reach>::run, Entry<&kernel, &reach>::Of::sizes,    \
        &Entry<&kernel, &reach>::ran},
#define ONE(kernel) ENTRY(kernel, reach_##kernel)
#define ATTENTION_TYPE(kernel, type)                                                                                   \
    ENTRY(kernel##_##type##_64, reach_##kernel) ENTRY(kernel##_##type##_128, reach_##kernel)                           \
    ENTRY(kernel##_##type##_256, reach_##kernel)
#define ATTENTION_ROWS(kernel) ATTENTION_TYPE(kernel, f16) ATTENTION_TYPE(kernel, f32)
#define TILE_ROW(name, Format, number) ONE(tile_##name)

static const Row TABLE[] = {
    ENTRY(INTERFACE, reach_nothing) ENTRY(products_1, reach_products) ENTRY(products_8, reach_products)
    ENTRY(turn_f16, reach_turn) ENTRY(turn_f32, reach_turn) ONE(embed) ONE(decode) ONE(silu_multiply)
    ATTENTION_ROWS(attention_parts) ATTENTION_ROWS(attention_prompt) ONE(attention_merge) ONE(choose)
    EACH_FORMAT(TILE_ROW) ONE(halves_f16) ONE(halves_bf16) ONE(unscale) ONE(attention_queries)
    ENTRY(attention_gather_f16, reach_attention_gather) ENTRY(attention_gather_f32, reach_attention_gather)
    ONE(attention_shares) ONE(attention_result)
};

}  // namespace emulation

#define EXPORT extern "C" __attribute__((visibility("default")))

// Gives the emulated driver all kernels; false where it is not loaded.
EXPORT bool emulated_kernels_register() {
    using namespace emulation;
    typedef bool (*Register)(const char *, Declare, Run, size_t);
    Register add_kernel = (Register)dlsym(RTLD_DEFAULT, "fakecuda_register_kernel");
    declare_range = (decltype(declare_range))dlsym(RTLD_DEFAULT, "fakecuda_declare");
    pointer_to = (decltype(pointer_to))dlsym(RTLD_DEFAULT, "fakecuda_pointer");
    touch = (decltype(touch))dlsym(RTLD_DEFAULT, "fakecuda_touch");
    if (add_kernel == nullptr || declare_range == nullptr || pointer_to == nullptr || touch == nullptr) {
        return false;
    }
    for (const Row &row : TABLE) {
        add_kernel(row.name, row.declare, row.run, 0);
    }
    return true;
}

// What the driver reads of a module: a PTX text with the kernels' names and the sizes of their parameters.
EXPORT const char *emulated_kernels_ptx() {
    static const std::string text = [] {
        std::string all = ".version 9.0\n.target sm_80\n.address_size 64\n";
        for (const emulation::Row &row : emulation::TABLE) {
            all += std::string(".visible .entry ") + row.name + "(" + row.sizes() + ")\n{\n\tret;\n}\n";
        }
        return all;
    }();
    return text.c_str();
}

// The kernels that have run, a line each.
EXPORT const char *emulated_kernels_that_ran() {
    static std::string text;
    text.clear();
    for (const emulation::Row &row : emulation::TABLE) {
        if (*row.ran) {
            text += std::string(row.name) + "\n";
        }
    }
    return text.c_str();
}

// A program that is run with this library preloaded need not know of it.
__attribute__((constructor)) static void at_load() {
    emulated_kernels_register();
}
