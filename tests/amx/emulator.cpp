// Executes the AMX instructions that the kernels use on a CPU without them. It is a library for LD_PRELOAD, whose
// handler of illegal instructions decodes them. It shares no code with src/simd, so that it can contradict it.
// Encodings and results are those of Intel's manual (Software Developer's Manual, volume 2).
#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
  int rows, row_bytes;
  uint8_t data[16][64];
};
thread_local Tile tiles[8];
thread_local bool configured = false;
long products = 0;

[[noreturn]] void stop(const char* reason) {
  std::fprintf(stderr, "AMX emulator: %s\n", reason);
  std::abort();
}

enum Prefix { NONE = 0, P66 = 1, PF3 = 2, PF2 = 3 };

// An instruction with a VEX prefix of three bytes, opcode map 0F38, no W and no L.
struct Instruction {
  const uint8_t* end;
  int opcode, reg, rm, vvvv;
  Prefix prefix;
  bool is_memory;
  uint8_t* base;   // with the displacement
  int64_t index;   // of a SIB byte, scaled
};

int64_t general_register(const ucontext_t& context, int number) {
  static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[order[number]];
}

Instruction decode(const ucontext_t& context) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  if (p[0] != 0xc4 || (p[1] & 0x9f) != 0x82 || (p[2] & 0x84) != 0) stop("this instruction is not one of AMX");
  const int high_index = p[1] & 0x40 ? 0 : 8, high_base = p[1] & 0x20 ? 0 : 8;
  const int mod = p[4] >> 6, rm = p[4] & 7;
  const Prefix prefix = static_cast<Prefix>(p[2] & 3);
  Instruction i{p + 5, p[3], p[4] >> 3 & 7, rm, ~(p[2] >> 3) & 15, prefix, mod != 3, nullptr, 0};
  if (!i.is_memory) return i;
  int displacement = mod == 1 ? 1 : mod == 2 ? 4 : 0;
  int64_t base = 0;
  bool is_relative = false;
  if (rm == 4) {
    const int sib = *i.end++, index = (sib >> 3 & 7) + high_index;
    if (index != 4) i.index = general_register(context, index) << (sib >> 6);
    if ((sib & 7) == 5 && mod == 0) displacement = 4;
    else base = general_register(context, (sib & 7) + high_base);
  } else if (rm == 5 && mod == 0) {
    is_relative = true;
    displacement = 4;
  } else {
    base = general_register(context, rm + high_base);
  }
  int32_t far = 0;
  if (displacement == 1) far = static_cast<int8_t>(*i.end);
  if (displacement == 4) std::memcpy(&far, i.end, 4);
  i.end += displacement;
  i.base = reinterpret_cast<uint8_t*>(base + far + (is_relative ? reinterpret_cast<int64_t>(i.end) : 0));
  return i;
}

void configure(const uint8_t* shapes) {
  if (shapes[0] != 1) stop("the palette is not 1");
  for (int byte = 1; byte < 16; ++byte)
    if (shapes[byte]) stop("a reserved byte is not 0");
  for (int t = 0; t < 16; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, shapes + 16 + 2 * t, 2);
    const int rows = shapes[48 + t];
    if (row_bytes > 64 || rows > 16 || !row_bytes != !rows || (t > 7 && rows)) stop("this is not the shape of a tile");
    if (t < 8) tiles[t] = Tile{rows, row_bytes, {}};
  }
  configured = true;
}

Tile& tile(int number) {
  if (!configured || number > 7 || !tiles[number].rows) stop("the tile is not configured");
  return tiles[number];
}

void load(Tile& to, const Instruction& i) {
  std::memset(to.data, 0, sizeof to.data);
  for (int r = 0; r < to.rows; ++r) std::memcpy(to.data[r], i.base + r * i.index, static_cast<size_t>(to.row_bytes));
}

void store(const Tile& from, const Instruction& i) {
  for (int r = 0; r < from.rows; ++r)
    std::memcpy(i.base + r * i.index, from.data[r], static_cast<size_t>(from.row_bytes));
}

void add_int8(const uint8_t* a, const uint8_t* b, uint8_t* c) {
  int32_t sum;
  std::memcpy(&sum, c, 4);
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[i]);
  std::memcpy(c, &sum, 4);
}

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return flush(x);
}

// One row of the result: sums of even and of odd products, from 0, which are added, and then added to the row.
void add_bf16(const Tile& a, const Tile& b, Tile& c, int m) {
  float sums[32] = {};
  for (int k = 0; k < a.row_bytes / 4; ++k)
    for (int n = 0; n < c.row_bytes / 2; ++n)
      sums[n] = flush(std::fma(half(&a.data[m][4 * k + n % 2 * 2]), half(&b.data[k][2 * n]), sums[n]));
  for (int n = 0; n < c.row_bytes / 4; ++n) {
    float sum;
    std::memcpy(&sum, &c.data[m][4 * n], 4);
    sum = flush(flush(sum) + flush(sums[2 * n] + sums[2 * n + 1]));
    std::memcpy(&c.data[m][4 * n], &sum, 4);
  }
}

void multiply(const Instruction& i) {
  Tile &c = tile(i.reg), &a = tile(i.rm), &b = tile(i.vvvv);
  if (&a == &b || &b == &c || &c == &a) stop("two operands are the same tile");
  if (c.rows != a.rows || a.row_bytes != 4 * b.rows || c.row_bytes != b.row_bytes) stop("the shapes do not fit");
  for (int m = 0; m < c.rows; ++m) {
    if (i.opcode == 0x5c) add_bf16(a, b, c, m);
    for (int k = 0; i.opcode == 0x5e && k < a.row_bytes / 4; ++k)
      for (int n = 0; n < c.row_bytes; n += 4) add_int8(&a.data[m][4 * k], &b.data[k][n], &c.data[m][n]);
  }
  ++products;
}

void execute(int, siginfo_t*, void* pointer) {
  ucontext_t& context = *static_cast<ucontext_t*>(pointer);
  const Instruction i = decode(context);
  const bool has_stride = i.is_memory && i.rm == 4;
  if (i.opcode == 0x49 && i.prefix == NONE && i.is_memory) configure(i.base + i.index);
  else if (i.opcode == 0x49 && i.prefix == NONE && i.reg == 0 && i.rm == 0) configured = false;
  else if (i.opcode == 0x49 && i.prefix == PF2 && !i.is_memory) std::memset(tile(i.reg).data, 0, sizeof(Tile::data));
  else if (i.opcode == 0x4b && i.prefix == PF2 && has_stride) load(tile(i.reg), i);
  else if (i.opcode == 0x4b && i.prefix == PF3 && has_stride) store(tile(i.reg), i);
  else if (i.opcode == 0x5e && i.prefix == PF2 && !i.is_memory) multiply(i);  // tdpbssd
  else if (i.opcode == 0x5c && i.prefix == PF3 && !i.is_memory) multiply(i);  // tdpbf16ps
  else stop("this instruction is not emulated");
  context.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<int64_t>(i.end);
}

__attribute__((constructor)) void install() {
  struct sigaction action = {};
  action.sa_sigaction = execute;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

__attribute__((destructor)) void report() {
  if (products) std::fprintf(stderr, "AMX emulator: %ld products\n", products);
}

}  // namespace

// In place of libc's: this system has no tiles that it could permit.
extern "C" long syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (long& argument : a) argument = va_arg(list, long);
  va_end(list);
  if (number == SYS_arch_prctl && a[0] == 0x1023) return a[1] == 18 ? 0 : -1;
  static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
