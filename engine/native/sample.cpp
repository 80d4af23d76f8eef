// Choosing tokens from rows of scores: the largest, or one drawn from what temperature, top-k, top-p and min-p leave,
// and the judgement of drafts that were drawn (arXiv 2211.17192).
//
// A row is one chunk of work. Nothing is sorted: a cut is a least score, looked for among the few that can be it.
// The rules are those of `engine.sampling`, the random numbers those of `engine.draw`.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

constexpr int64_t STRETCH = 64 * WIDTH;  // scores that are summed, and whose largest are kept, together
constexpr int BINS = 2048;        // by how far a score lies below the largest, in units of the temperature
constexpr float BINS_A_UNIT = 64;  // the last bin has all that lies further
constexpr float LEAST = -std::numeric_limits<float>::infinity();

typedef float HalfFloats __attribute__((vector_size(WIDTH * 2)));
typedef double Doubles __attribute__((vector_size(WIDTH * 4)));

namespace {

struct Entry {
    float score, mass;
};

struct Scratch {
    std::vector<float> weights, maxima, some;
    std::vector<double> sums;
    std::vector<Entry> entries;
    double bins[BINS + WIDTH];
};

__attribute__((noinline)) Scratch& own_scratch() {
    static thread_local Scratch own;
    return own;
}

// Settings of one row.
struct Cut {
    float temperature, top_p, min_p;
    int32_t top_k;
};

// The first number of Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) in [0, 1): see `engine.draw.uniform`.
double uniform(uint64_t seed, uint64_t position, uint32_t draw) {
    std::array<uint32_t, 4> word{uint32_t(position), uint32_t(position >> 32), draw, 0};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = uint64_t(word[0]) * 0xD2511F53u, second = uint64_t(word[2]) * 0xCD9E8D57u;
        word = {uint32_t(second >> 32) ^ word[1] ^ key[0], uint32_t(second), uint32_t(first >> 32) ^ word[3] ^ key[1],
                uint32_t(first)};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return double((uint64_t(word[1]) << 32 | word[0]) >> 11) * 0x1p-53;
}

// The sum of each two numbers half a vector apart.
Doubles halves_sum(Floats values) {
    HalfFloats half[2];
    std::memcpy(half, &values, sizeof half);
    return __builtin_convertvector(half[0], Doubles) + __builtin_convertvector(half[1], Doubles);
}

bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < WIDTH; i++) found |= mask[i];
    return found != 0;
#endif
}

// Calls each(at, number of them, scores) for a vector of the scores from place `begin` on after the other, the last
// one filled up with what no other is less than.
template <typename Each>
void each_vector(const float* scores, int64_t begin, int64_t end, const Each& each) {
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) each(i, WIDTH, load(scores + i));
    if (i == end) return;
    Floats last = splat(LEAST);
    std::memcpy(&last, scores + i, size_t(end - i) * sizeof(float));
    each(i, int(end - i), last);
}

// A row of scores, its largest, and what each weighs: e^((score - top) / temperature), softmax without its division.
class Row {
  public:
    Row(const float* scores, int64_t n) : scratch(own_scratch()), scores(scores), n(n) {
        scratch.maxima.clear();
        Ints bad = {};
        for (int64_t begin = 0; begin < n; begin += STRETCH) {
            Floats highest = splat(LEAST);
            each_vector(scores, begin, std::min(begin + STRETCH, n), [&](int64_t, int, Floats some) {
                bad |= some != some;
                highest = some > highest ? some : highest;
            });
            for (int i = 0; i < WIDTH; i++) scratch.maxima.push_back(highest[i]);
        }
        top = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
        finite = !any(bad) && top - top == 0;
    }

    // The first place of the largest score.
    int64_t best() const {
        const auto& maxima = scratch.maxima;
        const int64_t stretch = (std::find(maxima.begin(), maxima.end(), top) - maxima.begin()) / WIDTH;
        return std::find(scores + stretch * STRETCH, scores + n, top) - scores;
    }

    // Weigh all scores, and find the least that is kept.
    void apply(const Cut& cut) {
        temperature = cut.temperature;
        scratch.weights.resize(size_t(n + WIDTH));
        float* to = scratch.weights.data();
        each_vector(scores, 0, n,
                    [&](int64_t at, int, Floats some) { store(to + at, exponential(below_top(some))); });
        if (cut.top_k > 0 && cut.top_k < n) floor = top_k_border(cut.top_k);
        if (cut.top_p < 1.0f) floor = std::max(floor, top_p_border(cut.top_p, sum_up()));
        least = cut.min_p;
    }

    // The sum of the weights that are kept, and of those of each stretch.
    double sum_up() {
        scratch.sums.clear();
        const float* weights = scratch.weights.data();
        double total = 0;
        for (int64_t begin = 0; begin < n; begin += STRETCH) {
            Doubles sum = {};
            each_vector(scores, begin, std::min(begin + STRETCH, n), [&](int64_t at, int count, Floats some) {
                Floats part = load(weights + at);
                part = (some >= floor) & (part >= least) ? part : Floats{};
                for (int i = count; i < WIDTH; i++) part[i] = 0;
                sum += halves_sum(part);
            });
            double own = 0;
            for (int i = 0; i < WIDTH / 2; i++) own += sum[i];
            scratch.sums.push_back(own);
            total += own;
        }
        return total;
    }

    // The first place at which the running sum of what is kept passes the part `u` of it.
    int64_t draw(double u) {
        const double target = u * sum_up();
        double before = 0;
        int64_t stretch = -1;
        for (size_t i = 0; i < scratch.sums.size(); i++) {
            if (scratch.sums[i] <= 0) continue;
            if (stretch >= 0) before += scratch.sums[size_t(stretch)];
            stretch = int64_t(i);
            if (before + scratch.sums[i] > target) break;
        }
        int64_t last = -1;  // for the running sum may be rounded to less than the sum that said that it is in here
        for (int64_t i = stretch * STRETCH; i < std::min(n, (stretch + 1) * STRETCH); i++) {
            if (!(kept(i) > 0)) continue;
            before += kept(i);
            last = i;
            if (before > target) break;
        }
        return last;
    }

    void give_probabilities(float* to) {
        const double total = sum_up();
        for (int64_t i = 0; i < n; i++) to[i] = float(kept(i) / total);
    }

    // Weights that are there already, of which none is cut.
    static Row of_weights(const float* weights, int64_t n) { return Row(weights, n, 0); }

    float top = 0;
    bool finite = true;

  private:
    Row(const float* weights, int64_t n, int) : scratch(own_scratch()), scores(weights), n(n) {
        scratch.weights.assign(weights, weights + n);
        scratch.weights.resize(size_t(n + WIDTH));
    }

    float kept(int64_t i) const {
        const float weight = scratch.weights[size_t(i)];
        return scores[i] >= floor && weight >= least ? weight : 0.0f;
    }

    Floats below_top(Floats some) const { return (some - top) / temperature; }

    // The k-th largest score. As many largest ones of parts of the row are not less than the k-th of them.
    float top_k_border(int64_t k) {
        float bound = LEAST;
        if (k <= int64_t(scratch.maxima.size())) {
            auto& some = scratch.some = scratch.maxima;
            std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
            bound = some[size_t(k - 1)];
        }
        return border<false>(bound, 0.0f, double(k));
    }

    // The least score above which less than `top_p` of the total lies. Those that weigh so little that all of them
    // together are less than what may be left out cannot be it.
    float top_p_border(float top_p, double total) {
        const float lightest = float((1.0 - double(top_p)) * total / double(n) / 2);
        return border<true>(floor, lightest, double(top_p) * total);
    }

    // The least score above which less than `limit` lies, in weight or in number, of those from `bound` on that weigh
    // at least `lightest`. Their bin is found first, and then the place within it.
    template <bool BY_WEIGHT>
    float border(float bound, float lightest, double limit) {
        std::fill(scratch.bins, scratch.bins + BINS, 0.0);
        each_binned(bound, lightest, [&](int64_t at, Ints bins) {
            for (int i = 0; i < WIDTH; i++)
                scratch.bins[bins[i]] += BY_WEIGHT ? scratch.weights[size_t(at + i)] : 1.0f;
        });
        int32_t bin = 0;
        double before = 0, after = 0;
        for (int32_t i = 0; i < BINS && after < limit; i++) {
            if (scratch.bins[i] == 0) continue;
            bin = i;
            before = after;
            after += scratch.bins[i];
        }
        scratch.entries.clear();
        each_binned(bound, lightest, [&](int64_t at, Ints bins) {
            if (!any(bins == bin)) return;
            for (int i = 0; i < WIDTH; i++)
                if (bins[i] == bin)
                    scratch.entries.push_back({scores[at + i], BY_WEIGHT ? scratch.weights[size_t(at + i)] : 1.0f});
        });
        return border_of_entries(limit - before);
    }

    // Calls each(place, bins) for vectors with some from `bound` on that weigh at least `lightest`. All others are in
    // bins behind the last one, each lane in its own, so that no branch is taken for each and no sum waits for another.
    template <typename Each>
    void each_binned(float bound, float lightest, const Each& each) const {
        const float* weights = scratch.weights.data();
        Ints lane;
        for (int i = 0; i < WIDTH; i++) lane[i] = i;
        each_vector(scores, 0, n, [&](int64_t at, int count, Floats some) {
            const Ints here = (some >= bound) & (load(weights + at) >= lightest) & (lane < count);
            if (!any(here)) return;
            const Floats far = below_top(some) * -BINS_A_UNIT, last = splat(BINS - 1);
            const Ints bins = __builtin_convertvector(far < last ? far : last, Ints);
            each(at, here ? bins : lane + BINS);
        });
    }

    // The least score of the entries above which less than `limit` of their mass lies; the highest is always within.
    // By partitions around one of them, as quickselect.
    float border_of_entries(double limit) {
        Entry *begin = scratch.entries.data(), *end = begin + scratch.entries.size();
        double before = 0;
        float found = top;
        while (begin < end) {
            const float a = begin->score, b = begin[(end - begin) / 2].score, c = end[-1].score;
            const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            double above = 0, equal = 0;
            Entry* middle = std::partition(begin, end, [&](const Entry& e) {
                if (e.score > pivot) above += e.mass;
                return e.score > pivot;
            });
            if (before + above >= limit && middle > begin) {
                end = middle;
                continue;
            }
            found = pivot;
            begin = std::partition(middle, end, [&](const Entry& e) {
                if (e.score == pivot) equal += e.mass;
                return e.score == pivot;
            });
            before += above + equal;
            if (before >= limit) break;
        }
        return found;
    }

    Scratch& scratch;
    const float* scores;
    const int64_t n;
    float floor = LEAST, least = 0, temperature = 1;
};

// Row r of what `engine.ops.packed_sampling` packs: temperatures and top_k, then top_p and min_p, of all rows each.
Cut cut_of(const int64_t* words, int64_t rows, int64_t row) {
    Cut cut;
    const char *first = reinterpret_cast<const char*>(words), *second = first + rows * 8;
    std::memcpy(&cut.temperature, first + row * 4, 4);
    std::memcpy(&cut.top_k, first + (rows + row) * 4, 4);
    std::memcpy(&cut.top_p, second + row * 4, 4);
    std::memcpy(&cut.min_p, second + (rows + row) * 4, 4);
    return cut;
}

// A product that is not joined with a sum behind it: it is to be rounded as torch rounds it.
__attribute__((noinline)) float rounded_product(float a, float b) { return a * b; }

}  // namespace

extern "C" {

// Numbers of float32 rows [rows, n] that lie `stride` numbers apart. packed [4, rows]: seeds, positions, and what `Cut`
// holds. ids [rows]: -1 where the largest score is not finite.
void sample(const float* scores, int64_t stride, int64_t rows, int64_t n, const int64_t* packed, float greedy_below,
            int64_t* ids, int num_threads) {
    share(rows, num_threads, [=](int64_t r) {
        Row row(scores + r * stride, n);
        const Cut cut = cut_of(packed + 2 * rows, rows, r);
        if (!row.finite) {
            ids[r] = -1;
        } else if (cut.temperature < greedy_below || cut.top_k == 1) {
            ids[r] = row.best();
        } else {
            row.apply(cut);
            ids[r] = row.draw(uniform(uint64_t(packed[r]), uint64_t(packed[rows + r]), 0));
        }
    });
}

// The distributions that rows are drawn from, out [rows, n]. cuts: the last two rows of `packed` above.
void probabilities(const float* scores, int64_t stride, int64_t rows, int64_t n, const int64_t* cuts, float* out,
                   int num_threads) {
    share(rows, num_threads, [=](int64_t r) {
        Row row(scores + r * stride, n);
        row.apply(cut_of(cuts, rows, r));
        row.give_probabilities(out + r * n);
    });
}

// See `engine.penalties`. Row r has the tokens [cu[r], cu[r + 1]); each: repetition, presence, frequency [3, rows].
void penalize(float* scores, int64_t stride, int64_t rows, const int32_t* cu, const int32_t* tokens,
              const int32_t* counts, const float* each) {
    for (int64_t r = 0; r < rows; r++)
        for (int32_t i = cu[r]; i < cu[r + 1]; i++) {
            float& score = scores[r * stride + tokens[i]];
            const float penalized = score > 0 ? score / each[r] : rounded_product(score, each[r]);
            const float taken_off = rounded_product(each[2 * rows + r], float(counts[i]));
            score = penalized - (taken_off + (counts[i] > 0 ? each[rows + r] : 0.0f));
        }
}

// Drafts that were drawn, and the distributions that they and the target's tokens are drawn from.
struct Drafts {
    const float *target, *proposal;  // [places + requests, n], [places, n]
    const int64_t* tokens;           // -1 ends a draft
    const int32_t* cu;               // [requests + 1]
    const uint8_t* finite;           // [places + requests]
    const int64_t *seeds, *positions;  // [requests]
    int32_t* accepted;
    int64_t* own;  // the token after those that stay
    int64_t requests, n;
    int32_t accept, residual;  // the streams of random numbers
};

void reject(const Drafts* drafts, int num_threads) {
    const Drafts& d = *drafts;
    share(d.requests, num_threads, [&d](int64_t r) {
        const int64_t first = d.cu[r], drafted = d.cu[r + 1] - first, place = first + r, n = d.n;
        const auto u = [&](int64_t at, int32_t stream) {
            return uniform(uint64_t(d.seeds[r]), uint64_t(d.positions[r] + at), uint32_t(stream));
        };
        int64_t kept = 0;
        for (; kept < drafted; kept++) {
            const int64_t token = d.tokens[first + kept];
            if (token < 0 || !d.finite[place + kept]) break;
            const double p = d.target[(place + kept) * n + token], q = d.proposal[(first + kept) * n + token];
            if (!(u(kept, d.accept) * q < p)) break;
        }
        const float* p = d.target + (place + kept) * n;
        std::vector<float> rest;
        if (kept < drafted && d.tokens[first + kept] >= 0) {
            const float* q = d.proposal + (first + kept) * n;
            rest.resize(size_t(n));
            for (int64_t i = 0; i < n; i++) rest[size_t(i)] = std::max(p[i] - q[i], 0.0f);
        }
        // Nothing is left where p equals q but for rounding; then p itself is right.
        const bool left = std::any_of(rest.begin(), rest.end(), [](float weight) { return weight > 0; });
        d.accepted[r] = int32_t(kept);
        d.own[r] = Row::of_weights(left ? rest.data() : p, n).draw(u(kept, d.residual));
    });
}
}
