// Runs kernels' source on the CPU for the emulated CUDA driver (tests/fake-cuda): fibers, and what a table of kernels has
// of each. A library of kernels includes this file, then their source, and, in the namespace, has a TABLE of rows, each
// with a function of the kernel's parameters that says what a launch reads and writes. `exports.h` comes last.
#ifndef OUTCORE_MACHINE_H
#define OUTCORE_MACHINE_H

#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "emulation.h"

namespace emulation {

// ---- fibers ----

const unsigned WARP = 32;

[[noreturn]] static void fail(const char *what) {
    fprintf(stderr, "emulated kernel: %s\n", what);
    abort();
}

#ifdef __x86_64__
// A thread's or a fiber's stack, on which are the registers that a call keeps, and where it goes on.
struct Place {
    void *stack;
};

extern "C" __attribute__((visibility("hidden"))) void emulation_go(void **from, void *to);
asm(R"(
.text
.p2align 4
.hidden emulation_go
.globl emulation_go
.type emulation_go, @function
emulation_go:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_go, . - emulation_go
)");

// Leaves this place, to go on here later, and goes on at another.
static inline void go(Place &from, Place &to) {
    emulation_go(&from.stack, to.stack);
}

// A place at which `run` begins, which never returns.
static void prepare(Place &place, char *stack, size_t bytes, void (*run)()) {
    // Six registers, the address of `run`, and where it would return to: a function finds the stack 8 bytes off a
    // multiple of 16.
    void **top = (void **)(stack + bytes / 16 * 16) - 8;
    memset(top, 0, 8 * sizeof *top);
    top[6] = (void *)run;
    place.stack = top;
}
#else
// As above, with what every system has: a system call each time.
typedef ucontext_t Place;

static void go(Place &from, Place &to) {
    swapcontext(&from, &to);
}

static void prepare(Place &place, char *stack, size_t bytes, void (*run)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack + sizeof(Lane *) * 2;
    place.uc_stack.ss_size = bytes - sizeof(Lane *) * 2;
    place.uc_link = nullptr;
    makecontext(&place, run, 0);
}
#endif

struct Processor;

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
    Processor *processor;
    // Where it goes on.
    Place place;
    bool ended;
    unsigned index, exchanges;
    // The next one of the block, and of the warp.
    Fiber *next, *beside;
    // Copies that are on their way, and how many belong to each commit: the last one's are not committed yet.
    std::vector<std::pair<void *, const void *>> copies;
    std::vector<size_t> commits;
};

struct Reached {
    uint64_t bytes;
    bool write;
    uintptr_t at;
};

// A thread that runs blocks, one at a time.
struct Processor {
    std::vector<Fiber *> fibers;
    std::vector<Warp> warps;
    Meeting everyone;
    unsigned living;
    // How often lanes gave way since something last happened.
    unsigned idle;
    // Where the thread itself goes on.
    Place caller;
    Dim block;
    // Ranges that the driver has allowed the running launch, by their starts, and where they are on the host.
    std::map<uint64_t, Reached> reached;
    // What a kernel that follows a wrong address reads and writes instead, so that the launch ends with the driver's
    // finding alone. Each stays where it is for the whole launch: lanes that wait have its address.
    std::list<std::vector<char>> nowhere;
};

// The launch that runs: one at a time.
struct Running {
    Dim grid, threads;
    void (*kernel)(void *);
    void *arguments;
};
static Running running;

Dim &grid = running.grid;

static Fiber *current() {
    return self()->fiber;
}

// Gives way to the next lane of the block, or of the warp, that has not ended.
static void give_way(Fiber *Fiber::*next) {
    Fiber *from = current(), *to = from->*next;
    if (++from->processor->idle > 4 * from->processor->fibers.size() + 4) {
        fail("lanes wait for each other: a barrier that not all of a block reach, or a shuffle that not all of a warp reach");
    }
    while (to->ended) {
        to = to->*next;
    }
    if (to != from) {
        go(from->place, to->place);
    }
}

static void release(Processor &processor, Meeting &meeting) {
    meeting.arrived = 0;
    meeting.number++;
    processor.idle = 0;
}

static void meet(Processor &processor, Meeting &meeting, Fiber *Fiber::*next) {
    uint64_t number = meeting.number;
    if (++meeting.arrived == meeting.expected) {
        release(processor, meeting);
        return;
    }
    while (meeting.number == number) {
        give_way(next);
    }
}

static void leave(Processor &processor, Meeting &meeting) {
    if (--meeting.expected == meeting.arrived && meeting.arrived > 0) {
        release(processor, meeting);
    }
}

void barrier() {
    Processor &processor = *current()->processor;
    meet(processor, processor.everyone, &Fiber::next);
}

uint64_t exchange(unsigned mask, uint64_t mine, int distance) {
    Fiber *self = current();
    Warp &warp = self->processor->warps[self->index / WARP];
    unsigned index = self->index % WARP, other = index ^ (unsigned)distance;
    if (mask != 0xffffffffu) {
        fail("only shuffles of whole warps are emulated");
    }
    unsigned number = ++self->exchanges, turn = number % 2;
    warp.slots[turn][index] = mine;
    warp.left_in[turn][index] = number;
    // Lanes of other warps would only find that nothing has changed for them.
    meet(*self->processor, warp.meeting, &Fiber::beside);
    if (warp.left_in[turn][other] != number) {
        fail("a shuffle reads a lane that takes no part in it");
    }
    return warp.slots[turn][other];
}

void copy_later(void *to, const void *from) {
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0) {
        fail("a copy of 16 bytes that are not aligned");
    }
    current()->copies.push_back({to, from});
}

void commit() {
    Fiber *self = current();
    size_t before = 0;
    for (size_t count : self->commits) {
        before += count;
    }
    self->commits.push_back(self->copies.size() - before);
}

void wait(unsigned pending) {
    Fiber *self = current();
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
    Fiber *self = current();
    Processor &processor = *self->processor;
    for (;;) {
        running.kernel(running.arguments);
        if (!self->copies.empty()) {
            fail("a lane ends while its copies are on their way");
        }
        self->commits.clear();
        self->ended = true;
        leave(processor, processor.everyone);
        leave(processor, processor.warps[self->index / WARP].meeting);
        processor.idle = 0;
        if (--processor.living == 0) {
            go(self->place, processor.caller);
        } else {
            give_way(&Fiber::next);
        }
    }
}

static Fiber *new_fiber(Processor &processor, unsigned index) {
    Fiber *fiber = new Fiber();
    char *stack = (char *)aligned_alloc(STACK, STACK);
    if (stack == nullptr) {
        fail("no memory for a stack");
    }
    fiber->lane.fiber = fiber;
    fiber->lane.block = &processor.block;
    fiber->processor = &processor;
    fiber->index = index;
    *(Lane **)stack = &fiber->lane;
    // The stacks' tops are not at multiples of one power of two, or what all lanes have on them would share a few lines
    // of the cache.
    prepare(fiber->place, stack, STACK - index % 61 * 192, run_lane);
    return fiber;
}

static void run_block(Processor &processor) {
    unsigned threads = running.threads.x;
    while (processor.fibers.size() < threads) {
        processor.fibers.push_back(new_fiber(processor, (unsigned)processor.fibers.size()));
    }
    processor.warps.assign((threads + WARP - 1) / WARP, Warp());
    for (unsigned i = 0; i < threads; i++) {
        Fiber *fiber = processor.fibers[i];
        fiber->lane.thread = {i, 0, 0};
        fiber->ended = false;
        fiber->exchanges = 0;
        fiber->next = processor.fibers[(i + 1) % threads];
        unsigned warp = i / WARP * WARP;
        fiber->beside = processor.fibers[warp + (i - warp + 1) % std::min(WARP, threads - warp)];
        processor.warps[i / WARP].meeting.expected++;
    }
    processor.everyone = {threads, 0, 0};
    processor.living = threads;
    processor.idle = 0;
    go(processor.caller, processor.fibers[0]->place);
}

// ---- processors ----

// Blocks run on as many threads as the machine has processors, and on no more than four: grids are small. The thread
// that the driver runs the launch on answers what their kernels follow meanwhile, because the driver judges an address
// in that thread. Never freed: the threads wait for launches until the process ends.
struct Machine {
    std::mutex mutex;
    std::condition_variable called, answered;
    std::vector<Processor *> processors;
    // Counts launches, so that each thread takes part in each once.
    uint64_t launch = 0;
    // Threads that have not finished the launch.
    unsigned busy = 0;
    std::atomic<uint64_t> next_block{0};
    // What one thread wants to follow, and what the driver says.
    struct Question {
        uint64_t address, bytes;
        bool write, asked, known;
        uintptr_t at;
    } question = {};
};

static Machine &machine() {
    static Machine *one = new Machine();
    return *one;
}

static uintptr_t (*touch)(uint64_t, uint64_t, bool);

uintptr_t follow(uint64_t address, uint64_t bytes, bool write) {
    Processor &processor = *current()->processor;
    auto known = processor.reached.find(address);
    if (known != processor.reached.end() && known->second.bytes >= bytes && (known->second.write || !write)) {
        return known->second.at;
    }
    Machine &all = machine();
    std::unique_lock<std::mutex> lock(all.mutex);
    Machine::Question &question = all.question;
    all.answered.wait(lock, [&] { return !question.asked; });
    question = {address, bytes, write, true, false, 0};
    all.called.notify_all();
    all.answered.wait(lock, [&] { return question.known; });
    uintptr_t at = question.at;
    question.asked = false;
    all.answered.notify_all();
    if (at == 0) {
        processor.nowhere.emplace_back(bytes);
        return (uintptr_t)processor.nowhere.back().data();
    }
    processor.reached[address] = {bytes, write, at};
    return at;
}

static void run_blocks(Processor &processor) {
    processor.reached.clear();
    processor.nowhere.clear();
    uint64_t x = running.grid.x, y = running.grid.y, count = x * y * running.grid.z;
    for (uint64_t block; (block = machine().next_block++) < count;) {
        processor.block = {(unsigned)(block % x), (unsigned)(block / x % y), (unsigned)(block / x / y)};
        run_block(processor);
    }
}

static void work(Processor &processor) {
    Machine &all = machine();
    std::unique_lock<std::mutex> lock(all.mutex);
    for (uint64_t done = 0;;) {
        all.called.wait(lock, [&] { return all.launch != done && all.busy != 0; });
        done = all.launch;
        lock.unlock();
        run_blocks(processor);
        lock.lock();
        all.busy--;
        all.called.notify_all();
    }
}

static void run_grid(Dim size, Dim threads, void (*what)(void *), void *with) {
    static std::mutex one;
    std::lock_guard<std::mutex> only(one);
    if (threads.y != 1 || threads.z != 1) {
        fail("only blocks of one dimension are emulated");
    }
    Machine &all = machine();
    std::unique_lock<std::mutex> lock(all.mutex);
    running = {size, threads, what, with};
    all.next_block = 0;
    for (unsigned wanted = std::clamp(std::thread::hardware_concurrency(), 1u, 4u); all.processors.size() < wanted;) {
        Processor *processor = new Processor();
        all.processors.push_back(processor);
        std::thread([processor] { work(*processor); }).detach();
    }
    all.busy = (unsigned)all.processors.size();
    all.launch++;
    all.called.notify_all();
    while (all.busy != 0) {
        all.called.wait(lock, [&] { return all.busy == 0 || (all.question.asked && !all.question.known); });
        Machine::Question question = all.question;
        if (question.asked && !question.known) {
            lock.unlock();
            uintptr_t at = touch(question.address, question.bytes, question.write);
            lock.lock();
            all.question.at = at;
            all.question.known = true;
            all.answered.notify_all();
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

// Blocks of the launch that this thread looks at (x, y): some kernels have one for each vector.
static thread_local unsigned blocks, rows_of_blocks;

[[maybe_unused]] static void reach_nothing(Reach &) {}

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

}  // namespace emulation

#endif
