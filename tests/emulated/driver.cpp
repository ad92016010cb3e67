// Runs kernels of a library for emulator.py: driver LIBRARY LEVEL [RUNTIME]. RUNTIME is a library of OpenMP, whose threads
// the kernels then use. Calls come from standard input, and answers go to standard output, both as numbers of eight
// bytes and plain bytes.
//
//   call    the name of the kernel with zeros up to 32 bytes; the number of blocks and of pointers
//           each block of memory: its size, its bytes; block 0 is the struct of the kernel
//           each pointer: the block and the place in it that holds the pointer, the block and the place that it points to
//   answer  0 and the bytes of all blocks; or the length of an error's text, and the text
#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void fail(const char* what) {
  std::fprintf(stderr, "driver: %s\n", what);
  std::exit(2);
}

void read_bytes(void* to, size_t count) {
  if (std::fread(to, 1, count, stdin) != count) fail("the call is incomplete");
}

int64_t read_number() {
  int64_t number;
  read_bytes(&number, sizeof number);
  return number;
}

void write_number(int64_t number) { std::fwrite(&number, sizeof number, 1, stdout); }

#if defined(_WIN32)
void* open(const char* path) { return reinterpret_cast<void*>(LoadLibraryA(path)); }
void* symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
#else
void* open(const char* path) { return dlopen(path, RTLD_NOW); }
void* symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

void* open_or_fail(const char* path) {
  void* const library = open(path);
  if (!library) fail((std::string("cannot load ") + path).c_str());
  return library;
}

template <class Function>
Function find(void* library, const std::string& name) {
  void* const found = symbol(library, name.c_str());
  if (!found) fail(("the library has no " + name).c_str());
  return reinterpret_cast<Function>(found);
}

// As openmp.py does.
void use_threads(void* library, void* runtime) {
  void* const in_parallel = find<void*>(runtime, "omp_in_parallel");
  if (void* const parallel = symbol(runtime, "GOMP_parallel"))
    return find<void (*)(void*, void*)>(library, "hfa_use_gomp")(parallel, in_parallel);
  find<void (*)(void*, void*, void*, void*)>(library, "hfa_use_kmpc")(
      find<void*>(runtime, "__kmpc_fork_call"), find<void*>(runtime, "__kmpc_push_num_threads"),
      find<void*>(runtime, "__kmpc_global_thread_num"), in_parallel);
}

// A block has its exact size, so that an allocator which checks bounds would notice what is beyond them.
struct Block {
  size_t size = 0;
  char* bytes = nullptr;
};

void answer_call(void* library, const char* kernel) {
  std::vector<Block> blocks(static_cast<size_t>(read_number()));
  const int64_t pointers = read_number();
  for (Block& block : blocks) {
    block.size = static_cast<size_t>(read_number());
    block.bytes = static_cast<char*>(std::malloc(block.size));
    read_bytes(block.bytes, block.size);
  }
  for (int64_t i = 0; i < pointers; ++i) {
    const int64_t holder = read_number(), at = read_number(), target = read_number(), offset = read_number();
    char* const pointer = blocks[static_cast<size_t>(target)].bytes + offset;
    std::memcpy(blocks[static_cast<size_t>(holder)].bytes + at, &pointer, sizeof pointer);
  }
  if (find<int (*)(const void*)>(library, std::string("hfa_") + kernel)(blocks[0].bytes)) {
    const char* const error = find<const char* (*)()>(library, "hfa_error")();
    write_number(static_cast<int64_t>(std::strlen(error)));
    std::fputs(error, stdout);
  } else {
    write_number(0);
    for (const Block& block : blocks) std::fwrite(block.bytes, 1, block.size, stdout);
  }
  std::fflush(stdout);
  for (const Block& block : blocks) std::free(block.bytes);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3 || count > 4) fail("usage: driver LIBRARY LEVEL [RUNTIME]");
#if defined(_WIN32)
  _setmode(_fileno(stdin), _O_BINARY);
  _setmode(_fileno(stdout), _O_BINARY);
#endif
  void* const library = open_or_fail(arguments[1]);
  if (count == 4) use_threads(library, open_or_fail(arguments[3]));
  if (find<int (*)(const char*)>(library, "hfa_select")(arguments[2])) fail("the level was not compiled");
  char kernel[32];
  while (std::fread(kernel, 1, sizeof kernel, stdin) == sizeof kernel) answer_call(library, kernel);
}
