#!/usr/bin/env python3
"""Writes a made-up trace for `outcore policies --trace`: one page a line, or requests in Mooncake's form where pages
are chains.

    traces.py KIND [SEED] > FILE
"""

import bisect
import heapq
import json
import random
import sys
from collections import deque
from itertools import accumulate


class Zipf:
    """Draws 0 to n - 1, the first most often."""

    def __init__(self, rng, n, s):
        self.rng, self.sums = rng, list(accumulate((i + 1) ** -s for i in range(n)))

    def draw(self):
        return bisect.bisect_left(self.sums, self.rng.random() * self.sums[-1])


def shuffled(rng, n):
    order = list(range(n))
    rng.shuffle(order)
    return order


def zipf(rng, uses=1_000_000, n=100_000):
    """Popularity that does not change."""
    draw, page = Zipf(rng, n, 0.9), shuffled(rng, n)
    for _ in range(uses):
        yield page[draw.draw()]


def drift(rng, uses=1_000_000, n=100_000):
    """Zipf's law, in which each rank passes to another page after a while, the first as the last."""
    draw, page = Zipf(rng, n, 0.9), shuffled(rng, n)
    for use in range(uses):
        if use % 10 == 0:
            a, b = draw.draw(), rng.randrange(n)
            page[a], page[b] = page[b], page[a]
        yield page[draw.draw()]


def scans(rng, uses=1_000_000):
    """A hot set, and one scan after the other of tables that are larger or smaller."""
    draw, page = Zipf(rng, 20_000, 0.8), shuffled(rng, 20_000)
    tables = [(20_000, 3_000), (23_000, 12_000), (35_000, 40_000), (75_000, 60_000)]
    done = 0
    while done < uses:
        first, pages = rng.choice(tables)
        for at in range(pages):
            yield first + at
            yield page[draw.draw()]
        done += 2 * pages
        for _ in range(rng.randrange(20_000)):
            yield page[draw.draw()]
            done += 1


def loop(rng, uses=1_000_000, n=60_000):
    """A loop; one use in twenty is of a page anywhere in it."""
    at = 0
    for _ in range(uses):
        if rng.random() < 0.05:
            yield rng.randrange(n)
        else:
            yield at
            at = (at + 1) % n


def database(rng, uses=1_000_000):
    """Look-ups through a B-tree to heap pages, range scans over leaves, inserts at the end that are read soon."""
    leaves, fan, heap = 60_000, 200, 120_000
    inner = leaves // fan
    draw, page = Zipf(rng, leaves, 0.75), shuffled(rng, leaves)
    base_leaf, base_heap = 1 + inner, 1 + inner + leaves
    end, done = base_heap + heap, 0
    recent = deque(maxlen=4_000)
    while done < uses:
        what = rng.random()
        if what < 0.62:
            leaf = page[draw.draw()]
            # The heap pages of a leaf are its own two, which are not near each other.
            got = [0, 1 + leaf // fan, base_leaf + leaf, base_heap + (leaf * 7919 + rng.randrange(2)) % heap]
        elif what < 0.64:
            leaf = rng.randrange(leaves - 400)
            got = [0, 1 + leaf // fan] + [base_leaf + leaf + i for i in range(rng.randrange(20, 400))]
        elif what < 0.80:
            end += rng.random() < 0.3
            recent.append(end)
            got = [0, 1 + inner - 1, end]
        else:
            back = min(int(rng.expovariate(1 / 600)), len(recent) - 1)
            got = [recent[-1 - back]] if recent else [0]
        for each in got:
            yield each
        done += len(got)


def disk(rng, uses=1_000_000):
    """Blocks below another cache: short runs, many used once, some again soon, others by a long-term popularity."""
    draw, place = Zipf(rng, 50_000, 0.7), shuffled(rng, 50_000)
    new, done = 400_000, 0
    again = []
    while done < uses:
        while again and again[0][0] <= done:
            yield heapq.heappop(again)[1]
            done += 1
        if rng.random() < 0.45:
            first, count = new, rng.randrange(1, 9)
            new += count
        else:
            first, count = place[draw.draw()] * 8, rng.choice([1, 1, 2, 4])
        for at in range(first, first + count):
            yield at
            done += 1
            if rng.random() < 0.35:
                heapq.heappush(again, (done + int(rng.lognormvariate(7, 1.5)), at))


def chats(rng, requests=10_000, users=400, system=8):
    """Many users' chats, told as chains: each turn sends what was said so far. One user in three leaves after a turn."""
    prompts = [[p * 100 + i for i in range(rng.randrange(1, 8))] for p in range(system)]
    draw = Zipf(rng, system, 1.0)
    new = 10_000
    live = []
    for _ in range(requests):
        if len(live) < users or rng.random() < 0.4:
            chat = list(prompts[draw.draw()])
            live.append(chat)
        else:
            # Who spoke lately speaks again.
            chat = live[-1 - min(int(rng.expovariate(1 / 120)), len(live) - 1)]
        chat += range(new, new + 1 + int(rng.expovariate(1 / 10)))
        new += 1_000
        yield {"hash_ids": list(chat)}
        live.remove(chat)
        if rng.random() < 0.7 and len(chat) < 200:
            live.append(chat)


def phases(rng):
    """Most of the above in turn, twice, each with pages of its own."""
    each = [zipf, loop, drift, scans, disk]
    for turn in range(2):
        for nth, make in enumerate(each):
            for page in make(random.Random(rng.random()), uses=150_000):
                yield page + nth * 10_000_000


def lately(rng, uses, window=2_500):
    """A window of pages that moves on; what was used last is used next."""
    for use in range(uses):
        new = use // 5
        yield new if use % 5 == 0 else max(0, new - int(rng.expovariate(1 / window)))


def popular(rng, uses, n=20_000):
    """Popularity that does not change, beside pages that are used once."""
    draw, page = Zipf(rng, n, 0.8), shuffled(rng, n)
    for use in range(uses):
        yield n + use if use % 3 == 0 else page[draw.draw()]


def changes(rng, uses=1_000_000):
    """A loop, recency and popularity in turn, twice, each with pages of its own: no policy suits all three."""
    each = uses // 6
    for _ in range(2):
        parts = [(at % 7_500 for at in range(each)), lately(rng, each), popular(rng, each)]
        for nth, part in enumerate(parts):
            for page in part:
                yield page + nth * 10_000_000


def web(rng, uses=1_000_000):
    """Objects that are born, are asked for at a rate that falls, and die; half are asked for once."""
    born, done, queue = 0, 0, []
    while done < uses:
        while queue and queue[0][0] <= done:
            _, page, rate = heapq.heappop(queue)
            yield page
            done += 1
            if rng.random() < 0.97:
                heapq.heappush(queue, (done + rng.expovariate(rate), page, rate * 0.93))
        born += 1
        yield born
        done += 1
        if rng.random() < 0.5:
            heapq.heappush(queue, (done + rng.expovariate(1), born, 10 ** -rng.uniform(1.5, 4.5)))


def build(rng, uses=1_000_000):
    """Like a build tool: modules in turn; in each, nested loops over sources, among headers that all use."""
    headers, page = Zipf(rng, 3_000, 0.6), shuffled(rng, 3_000)
    modules = [(3_000 + m * 4_000, rng.randrange(300, 4_000)) for m in range(40)]
    done = 0
    while done < uses:
        first, pages = modules[min(int(rng.expovariate(1 / 6)), 39)]
        for _ in range(rng.randrange(1, 5)):
            for at in range(first, first + pages):
                yield at
                for _ in range(rng.randrange(3)):
                    yield page[headers.draw()]
                    done += 1
                done += 1
        if rng.random() < 0.3:
            rng.shuffle(modules)


KINDS = {
    make.__name__: make for make in [zipf, drift, scans, loop, database, disk, chats, phases, changes, web, build]
}


def main():
    kind = KINDS[sys.argv[1]]
    rng = random.Random(f"{sys.argv[1]} {sys.argv[2] if len(sys.argv) > 2 else 0}")
    for use in kind(rng):
        print(json.dumps(use) if isinstance(use, dict) else use)


main()
