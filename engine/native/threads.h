// Threads that share the chunks of a job.
#pragma once

#include <cstdint>

using ChunkWork = void (*)(const void* context, int64_t chunk);

// Calls work(context, chunk) once for each chunk from 0 to num_chunks - 1, on up to num_threads threads of which the
// calling one is the first, and returns when all are done. Which thread gets which chunk is left to chance, so what a
// chunk computes must not depend on it.
void share(int64_t num_chunks, int num_threads, ChunkWork work, const void* context);

template <typename Work>
void share(int64_t num_chunks, int num_threads, const Work& work) {
    share(
        num_chunks, num_threads,
        [](const void* context, int64_t chunk) { (*static_cast<const Work*>(context))(chunk); }, &work);
}
