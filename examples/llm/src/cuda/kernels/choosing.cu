// ---- choosing a token ----

// The largest of n logits and where it is, for every lane of the one block; of equals the first. NaN never wins. If
// nothing wins, it is the first.
DEVICE void largest(const float *logits, u32 n, float *peak, u32 *where) {
    __shared__ float peaks[THREADS_ALL / LANES];
    __shared__ u32 places[THREADS_ALL / LANES];
    float best = -INFINITE;
    u32 at = 0xffffffffu;
    for (u32 i = threadIdx.x; i < n; i += THREADS_ALL) {
        if (logits[i] > best) {
            best = logits[i];
            at = i;
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, best, distance);
        u32 place = __shfl_xor_sync(0xffffffffu, at, distance);
        if (other > best || (other == best && place < at)) {
            best = other;
            at = place;
        }
    }
    if (threadIdx.x % LANES == 0) {
        peaks[threadIdx.x / LANES] = best;
        places[threadIdx.x / LANES] = at;
    }
    __syncthreads();
    best = peaks[0];
    at = places[0];
    for (int i = 1; i < THREADS_ALL / LANES; i++) {
        if (peaks[i] > best || (peaks[i] == best && places[i] < at)) {
            best = peaks[i];
            at = places[i];
        }
    }
    *peak = best;
    *where = at == 0xffffffffu ? 0 : at;
}

// For lane 0, the token with the largest of n logits where `temperature` is not positive; otherwise one drawn from
// softmax(logits / temperature) by `uniform`, which is at least 0 and less than 1. Lanes have consecutive stretches of
// the tokens, whose odds lane 0 then goes through in the tokens' order.
DEVICE u32 chosen(const float *logits, u32 n, float temperature, double uniform, double *odds) {
    float peak;
    u32 where, each = (n + THREADS_ALL - 1) / THREADS_ALL;
    largest(logits, n, &peak, &where);
    if (temperature <= 0.0f) {
        return where;
    }
    double sum = 0.0;
    for (u32 i = threadIdx.x * each; i < min((threadIdx.x + 1) * each, n); i++) {
        sum += exp((double)((logits[i] - peak) / temperature));
    }
    odds[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) {
        return 0;
    }
    double left = 0.0;
    for (u32 i = 0; i < THREADS_ALL; i++) {
        left += odds[i];
    }
    left *= uniform;
    u32 stretch = 0;
    while (stretch + 1 < THREADS_ALL && left >= odds[stretch]) {
        left -= odds[stretch];
        stretch++;
    }
    for (u32 i = stretch * each; i < n; i++) {
        left -= exp((double)((logits[i] - peak) / temperature));
        if (left < 0.0) {
            return i;
        }
    }
    return n - 1;
}

// How the token behind a vector is chosen: the likeliest one where `temperature` is not positive, or by `uniform`.
struct Draw {
    double uniform;
    float temperature;
    u32 unused;
};

// Chooses a token from each of m rows of n logits, a block each. The token becomes the next
// one to be read, at the next position, and is left where the host looks, in a ring by positions.
extern "C" __global__ void __launch_bounds__(THREADS_ALL) choose(const float *logits, const Draw *draws, u32 *tokens,
    u32 *positions, u32 *said, u32 n, u32 ring) {
    __shared__ double odds[THREADS_ALL];
    u32 j = blockIdx.x;
    const float *mine = logits + (u64)j * n;
    u32 token = chosen(mine, n, draws[j].temperature, draws[j].uniform, odds);
    if (threadIdx.x == 0) {
        tokens[j] = token;
        said[(u64)j * ring + positions[j] % ring] = token;
        positions[j]++;
    }
}
