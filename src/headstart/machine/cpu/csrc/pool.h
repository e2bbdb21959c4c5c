// A few threads that run one function together, and meet at barriers.
//
// Knows: how to wake, share out work and wait without losing time. Does not know: what the work is.
//
// Threads spin a little before they sleep: a decoder meets at some 150 barriers a step, far too often to ask the kernel.
// They give way after a short while, because the core may be wanted by others.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace hs {

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

class Pool {  // lives as long as the process
  public:
    explicit Pool(int threads) : size_(threads < 1 ? 1 : threads) {
        workers_.reserve(size_);
        try {
            for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { serve(i); });
        } catch (const std::system_error&) {  // the system gives no more: those there are will do
            size_ = (int)workers_.size() + 1;
        }
    }
    int size() const { return size_; }

    // Run work(argument, thread) on every thread, this one included; returns when all are done.
    void run(void (*work)(void*, int), void* argument) {
        std::lock_guard<std::mutex> one_at_a_time(entry_);
        work_ = work;
        argument_ = argument;
        if (size_ > 1) {
            epoch_.fetch_add(1);
            if (sleeping_.load() > 0) {
                { std::lock_guard<std::mutex> hold(mutex_); }
                wake_.notify_all();
            }
        }
        work(argument, 0);
        meet();
    }

    // Wait until all threads are here.
    void meet() {
        if (size_ == 1) return;
        const uint32_t now = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(now + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; round_.load(std::memory_order_acquire) == now; tries++) {
            if (tries < 4000)
                breathe();
            else
                std::this_thread::yield();
        }
    }

  private:
    void serve(int thread) {
        uint32_t seen = 0;
        for (;;) {
            for (int tries = 0; epoch_.load(std::memory_order_acquire) == seen; tries++) {
                if (tries < 500) {
                    breathe();
                } else if (tries < 1500) {  // about half a millisecond: the pause between two steps
                    std::this_thread::yield();
                    for (int i = 0; i < 8; i++) breathe();
                } else {
                    std::unique_lock<std::mutex> hold(mutex_);
                    sleeping_.fetch_add(1);
                    wake_.wait(hold, [&] { return epoch_.load() != seen; });
                    sleeping_.fetch_sub(1);
                }
            }
            seen = epoch_.load();
            work_(argument_, thread);
            meet();
        }
    }

    int size_;  // of all that run, the caller's included; nobody looks at it before the first run
    std::vector<std::thread> workers_;
    std::mutex entry_, mutex_;
    std::condition_variable wake_;
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// Work shared out piece by piece: whoever is free takes the next one.
class Share {
  public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    int take(int) { return take(); }  // like Turn's

  private:
    alignas(64) std::atomic<int> next_{0};
};

// The same for work that reads much memory, phase after phase: a thread first takes pieces of its own, one behind the
// other, so that it reads memory from end to end, and then helps where there are some left.
class Runs {
  public:
    void need(int threads, int phases) {
        if ((int)taken_.size() == threads && phases_ >= phases) return;
        phases_ = phases;
        taken_.clear();
        for (int i = 0; i < threads; i++) taken_.emplace_back(new std::atomic<int>[phases + 32]());  // no shared lines
    }
    void reset(int thread) {  // each thread for itself; then a barrier
        for (int i = 0; i < phases_; i++) taken_[thread][i].store(0, std::memory_order_relaxed);
    }
    int first(int thread, int pieces) const { return (int)((int64_t)pieces * thread / (int)taken_.size()); }
    int take(int thread, int phase, int pieces) {  // ``pieces`` if there are none left
        const int threads = (int)taken_.size();
        for (int i = 0; i < threads; i++) {
            const int whose = (thread + i) % threads, from = first(whose, pieces), count = first(whose + 1, pieces) - from;
            std::atomic<int>& taken = taken_[whose][phase];
            if (taken.load(std::memory_order_relaxed) >= count) continue;
            const int piece = taken.fetch_add(1, std::memory_order_relaxed);
            if (piece < count) return from + piece;
        }
        return pieces;
    }

  private:
    std::vector<std::unique_ptr<std::atomic<int>[]>> taken_;
    int phases_ = 0;
};

// Blocks that several threads make parts of: whoever brings a block's last part is told so.
class Ready {
  public:
    void need(size_t blocks) {
        if (blocks > parts_.size()) parts_ = std::vector<std::atomic<int>>(blocks);
    }
    bool add(size_t block, int parts, int all) {
        if (parts_[block].fetch_add(parts, std::memory_order_acq_rel) + parts < all) return false;
        parts_[block].store(0, std::memory_order_relaxed);  // nobody looks at it again before a barrier
        return true;
    }

  private:
    std::vector<std::atomic<int>> parts_;
};

struct Turn {  // a thread's in one phase
    Runs& runs;
    int thread, phase;
    int first(int pieces) const { return runs.first(thread, pieces); }
    int take(int pieces) const { return runs.take(thread, phase, pieces); }
};

}  // namespace hs
