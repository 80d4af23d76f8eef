// A pool of threads for jobs that take tens of microseconds.
//
// A forward pass makes some hundred of them, one behind the other. Waking a sleeping thread takes as long as such a
// job, so workers look out for the next one for a short while, but only as long as a pass is under way; otherwise they
// sleep. After the first microseconds they let others have the core between two looks: those of torch's own threads
// that are needed in the same pass, and other programs. Whoever is free takes the next chunk: a thread that has to wait
// for its core, because another program runs there, holds up nobody but the one chunk that it works on, and one that
// was not woken yet holds up nobody at all.

#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr auto LOOK_OUT = std::chrono::microseconds(100);  // longer than what stands between two jobs of a pass
constexpr auto ALONE = std::chrono::microseconds(10);       // of it, without asking whether others want the core

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether done() became true within LOOK_OUT.
template <typename Done>
bool look_out(const Done& done) {
    const auto begin = std::chrono::steady_clock::now();
    for (auto waited = begin - begin; waited < LOOK_OUT; waited = std::chrono::steady_clock::now() - begin) {
        for (int i = 0; i < 16; i++) {
            if (done()) return true;
            pause();
        }
        if (waited > ALONE) std::this_thread::yield();
    }
    return false;
}

class Pool {
  public:
    void run(int64_t num_chunks, int num_threads, ChunkWork work, const void* context) {
        std::unique_lock<std::mutex> own(in_use, std::try_to_lock);
        // A job of another thread is under way: its workers are not worth waiting for.
        if (!own.owns_lock() || num_threads <= 1 || num_chunks <= 1) {
            for (int64_t chunk = 0; chunk < num_chunks; chunk++) work(context, chunk);
            return;
        }
        hire(num_threads - 1);
        job_work = work;
        job_context = context;
        job_chunks = num_chunks;
        job_helpers = num_threads - 1;
        unfinished = num_chunks;
        tickets = ((tickets >> 32) + 1) << 32 | uint64_t(num_chunks);
        posted++;
        if (asleep) posted.notify_all();
        while (take_chunk(-1)) {}
        while (!look_out([this] { return unfinished == 0; })) std::this_thread::yield();
    }

    std::atomic<int> passes{0};  // forward passes under way

  private:
    void hire(int wanted) {
        for (; workers < wanted; workers++) try {
                std::thread(&Pool::serve, this, workers).detach();
            } catch (const std::system_error&) {
                return;  // the system gives no more threads: those that there are do the work
            }
    }

    // Take one chunk of the present job and compute it; false if there is none for this helper.
    bool take_chunk(int helper) {
        uint64_t seen = tickets;
        while (seen & 0xffffffffu) {
            // These are of the job that `seen` belongs to if the exchange succeeds, for the next job is only written
            // once all chunks of this one were taken.
            const ChunkWork work = job_work;
            const void* context = job_context;
            const int64_t chunk = job_chunks - int64_t(seen & 0xffffffffu);
            if (helper >= job_helpers) return false;
            if (tickets.compare_exchange_weak(seen, seen - 1)) {
                work(context, chunk);
                unfinished--;
                return true;
            }
        }
        return false;
    }

    void serve(int helper) {
        for (;;) {
            const int seen = posted;
            if (take_chunk(helper)) continue;
            if (passes > 0) look_out([&] { return posted != seen || passes == 0; });
            if (posted != seen) continue;
            asleep++;
            posted.wait(seen);
            asleep--;
        }
    }

    std::mutex in_use;
    int workers = 0;  // guarded by in_use
    std::atomic<ChunkWork> job_work{nullptr};
    std::atomic<const void*> job_context{nullptr};
    std::atomic<int64_t> job_chunks{0};
    std::atomic<int> job_helpers{0};
    std::atomic<int> asleep{0};
    alignas(64) std::atomic<uint64_t> tickets{0};  // upper half: number of the job, lower half: chunks nobody took yet
    alignas(64) std::atomic<int64_t> unfinished{0};
    alignas(64) std::atomic<int> posted{0};  // counts jobs; what sleeping workers wait on
};

// Never destroyed: workers use it until the process is gone.
std::atomic<Pool*> present{nullptr};

// A process that was forked has none of the threads, and a lock may be held by one of them for ever.
void start_anew() { present = new Pool; }

Pool& pool() {
    static const bool made = [] {
        start_anew();
        return pthread_atfork(nullptr, nullptr, start_anew) == 0;
    }();
    (void)made;
    return *present;
}

}  // namespace

void share(int64_t num_chunks, int num_threads, ChunkWork work, const void* context) {
    pool().run(num_chunks, num_threads, work, context);
}

extern "C" {

// `share`, for whoever has no C++.
void share_chunks(int64_t num_chunks, int num_threads, ChunkWork work, const void* context) {
    share(num_chunks, num_threads, work, context);
}

// Between these two, which may nest, workers are kept awake from job to job.
void pass_begins() { pool().passes++; }
void pass_ends() { pool().passes--; }
}
