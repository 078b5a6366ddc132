"""The peak of torch's own allocations, counted where they are made: every thread, no sampling.

On a GPU the caching allocator counts already. On a CPU a small allocator is put in front of torch's: it counts bytes
asked for and given back, whichever thread does it (gloo's threads free what they have sent, where a profiler of the
main thread sees nothing). Memory of Python, of compilers and of libraries is not in it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = """
#include <c10/core/CPUAllocator.h>
#include <mutex>
#include <unordered_map>

static std::mutex lock;
static std::unordered_map<void*, size_t> sizes;
static long now = 0, peak = 0;
static c10::Allocator* inner = nullptr;

static void give_back(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes.find(data);
    if (found != sizes.end()) { now -= found->second; sizes.erase(found); }
  }
  inner->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr given = inner->allocate(n);
    void* data = given.get();
    if (data == nullptr) return given;
    given.release_context();
    std::lock_guard<std::mutex> guard(lock);
    sizes[data] = n;
    now += n;
    if (now > peak) peak = now;
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

extern "C" void install() {
  static Counting counting;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 100);
}
extern "C" long in_use() { std::lock_guard<std::mutex> guard(lock); return now; }
extern "C" long most() { std::lock_guard<std::mutex> guard(lock); return peak; }
extern "C" void forget() { std::lock_guard<std::mutex> guard(lock); peak = now; }
"""


class Memory:
    """Bytes in use, and the most since `forget`."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.library: Any = None if self.cuda else ctypes.CDLL(str(build()))
        if self.library:
            for name in ("in_use", "most"):
                getattr(self.library, name).restype = ctypes.c_long
            self.library.install()

    def in_use(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else int(self.library.in_use())

    def most(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else int(self.library.most())

    def forget(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.library.forget()


def build() -> Path:
    """Compile the allocator once for this version of torch; the launcher calls this before it starts the ranks."""
    target = Path(tempfile.gettempdir()) / f"dbuf_counting_allocator_{os.getuid()}_{torch.__version__}.so"
    if not target.exists():
        source, fresh = target.with_suffix(".cpp"), target.with_suffix(f".{os.getpid()}")
        source.write_text(SOURCE)
        folders = [f"-I{folder}" for folder in include_paths()]
        libraries = [f"-L{folder}" for folder in library_paths()]
        command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", *folders, str(source), *libraries, "-lc10"]
        subprocess.run([*command, "-o", str(fresh)], check=True)
        fresh.replace(target)
    return target
