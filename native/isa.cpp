#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace huorn {
namespace {

#if defined(__x86_64__)
// CPUID says what the CPU has, XCR0 what the operating system saves between threads.
struct Cpu {
  unsigned leaf1_c = 0, leaf7_b = 0, leaf7_c = 0, leaf7_d = 0, leaf71_a = 0;
  unsigned long long saved = 0;
  Cpu() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) leaf1_c = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
      leaf7_b = b;
      leaf7_c = c;
      leaf7_d = d;
      if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) leaf71_a = a;
    }
    if (leaf1_c & (1u << 27)) {
      unsigned low = 0, high = 0;
      __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      saved = static_cast<unsigned long long>(high) << 32 | low;
    }
  }
  bool avx2() const {
    bool fma = leaf1_c & (1u << 12), f16c = leaf1_c & (1u << 29);
    return fma && f16c && (leaf7_b & (1u << 5)) && (saved & 0x6) == 0x6;
  }
  bool avx512() const {
    bool foundation = (leaf7_b & (1u << 16)) && (leaf7_b & (1u << 17)) && (leaf7_b & (1u << 30)) && (leaf7_b & (1u << 31));
    bool vbmi = leaf7_c & (1u << 1), bf16 = leaf71_a & (1u << 5);
    return avx2() && foundation && vbmi && bf16 && (saved & 0xe6) == 0xe6;
  }
  bool amx() const {
    return avx512() && (leaf7_d & (1u << 24)) && (leaf7_d & (1u << 22)) && (saved & 0x60000) == 0x60000;
  }
};

// Linux hands out the 8 KB of tile state only to processes that ask; threads started afterwards have it too.
bool ask_for_tiles() {
#if defined(__linux__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found{&portable_kernels};
#if defined(__x86_64__)
  static const Cpu cpu;
  static const bool tiles = cpu.amx() && ask_for_tiles();
  if (cpu.avx2()) found.push_back(&avx2_kernels);
  if (cpu.avx512()) found.push_back(&avx512_kernels);
  if (tiles) found.push_back(&amx_kernels);
#endif
  return found;
}

bool has_nan_code(const uint8_t* codes, size_t count) {
  uint8_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    uint8_t magnitude = codes[i] & 0x7f;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest == 0x7f;
}

}  // namespace huorn
