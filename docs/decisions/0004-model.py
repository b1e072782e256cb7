#!/usr/bin/env python3
"""The model behind decision 0004. Deterministic; prints its table.

A cycle over N pages, M frames. One disk loads one page at a time in time 1; computing on a page takes C. A frame is
free for a load when the last use of the page in it has ended.
"""

PASSES = 20


def belady(N, M, C, lookahead):
    """Fills in order of use, at most `lookahead` uses ahead; the victim is the page whose next use is farthest away."""
    resident, loads, ends, end_of = {}, [], [], [0.0]
    disk = compute = 0.0
    ahead = 0
    for t in range(N * PASSES):
        while ahead <= t + lookahead:
            page = ahead % N
            if page not in resident:
                freed = end_of[t]
                if len(resident) >= M:
                    victim = max(resident, key=lambda q: (q - t) % N)
                    if (victim - t) % N <= ahead - t:
                        break
                    del resident[victim]
                disk = max(disk, freed) + 1
                resident[page] = disk
                loads.append(ahead)
            ahead += 1
        compute = max(compute, resident[t % N]) + C
        end_of.append(compute)
        if (t + 1) % N == 0:
            ends.append(compute)
    half = PASSES // 2
    counted = [use for use in loads if half * N <= use < PASSES * N]
    return len(counted) / half, (ends[-1] - ends[half - 1]) / half


def static(N, M, C, ring, spread):
    """M - ring pages stay for good; the others stream through `ring` frames in order of use."""
    streamed_count = N - (M - ring)
    streamed = {j * N // streamed_count if spread else N - 1 - j for j in range(streamed_count)}
    disk = compute = 0.0
    ready, done, ends = [], [], []
    for _ in range(PASSES):
        for page in range(N):
            if page in streamed:
                k = len(done)
                free = done[k - ring] if k >= ring else 0.0
                disk = max(disk, free) + 1
                ready.append(disk)
                compute = max(compute, disk) + C
                done.append(compute)
            else:
                compute += C
        ends.append(compute)
    half = PASSES // 2
    return streamed_count, (ends[-1] - ends[half - 1]) / half


def main():
    N, M, ring = 200, 140, 8
    ways = [
        ("farthest next use, on demand", lambda c: belady(N, M, c, 0)),
        (f"the same, {ring} pages ahead", lambda c: belady(N, M, c, ring)),
        ("the same, as far ahead as frames allow", lambda c: belady(N, M, c, M - 1)),
        (f"resident block, ring of {ring}", lambda c: static(N, M, c, ring, False)),
        (f"resident pages spread, ring of {ring}", lambda c: static(N, M, c, ring, True)),
    ]
    costs = (0.1, 0.3, 0.6)
    print(f"N={N} M={M}")
    print("| way | loads a pass | " + " | ".join(f"pass, C = {c}" for c in costs) + " |")
    for name, run in ways:
        results = [run(c) for c in costs]
        loads = "/".join(sorted({f"{r[0]:.0f}" for r in results}))
        print(f"| {name} | {loads} | " + " | ".join(f"{r[1]:.0f}" for r in results) + " |")
    print("| bound: max(N*C, N-M) | 60 | " + " | ".join(f"{max(N * c, N - M):.0f}" for c in costs) + " |")


main()
