// Calls the compiled kernels for another process, in whose memory every argument lies: a test on x86-64 runs those of
// arm64 in qemu, see arm_kernels.py.
//
// Memory of the other process that a kernel touches is fetched when it is first missed, some pages at a time, at the address
// that it has there; after the call, what has changed goes back. Standard input and output carry the messages.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

enum Kind : uint64_t { FETCH = 0, STORE = 1, DONE = 2 };
struct Message { uint64_t kind, value, size; };  // value: an address, or what the call returned
struct Piece { char *at, *before; size_t size; };  // whole pages

std::vector<Piece> pieces;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void take(void* to, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t got = read(0, static_cast<char*>(to) + done, size - done);
    if (got <= 0) _exit(got == 0 && done == 0 ? 0 : 3);
    done += size_t(got);
  }
}

void give(const void* from, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t put = write(1, static_cast<const char*>(from) + done, size - done);
    if (put <= 0) _exit(4);
    done += size_t(put);
  }
}

char* memory(size_t size) {
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) _exit(5);
  return static_cast<char*>(at);
}

// Whole before any thread sees it: filled elsewhere, then moved.
void missed(int, siginfo_t* info, void*) {
  char* at = static_cast<char*>(info->si_addr);
  while (busy.test_and_set(std::memory_order_acquire)) {}
  bool there = false;
  for (const Piece& piece : pieces) there = there || (piece.at <= at && at < piece.at + piece.size);
  if (!there) {
    Message message{FETCH, uintptr_t(at), 0};
    give(&message, sizeof message);
    take(&message, sizeof message);
    Piece piece{reinterpret_cast<char*>(message.value), memory(message.size), message.size};
    char* now = memory(piece.size);
    take(now, piece.size);
    std::memcpy(piece.before, now, piece.size);
    if (mremap(now, piece.size, piece.size, MREMAP_MAYMOVE | MREMAP_FIXED, piece.at) != piece.at) _exit(6);
    pieces.push_back(piece);
  }
  busy.clear(std::memory_order_release);
}

void give_back() {
  for (const Piece& piece : pieces) {
    if (std::memcmp(piece.at, piece.before, piece.size) != 0) {
      Message message{STORE, uintptr_t(piece.at), piece.size};
      give(&message, sizeof message);
      give(piece.before, piece.size);
      give(piece.at, piece.size);
    }
    munmap(piece.at, piece.size);
    munmap(piece.before, piece.size);
  }
  pieces.clear();
}

template <class T>
T as(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Arguments of every function but its floats go through whole registers; `sametoken_linear` alone has floats.
int32_t call(void* library, const char* name, const uint64_t (&w)[12]) {
  void* found = dlsym(library, name);
  if (found == nullptr) _exit(7);
  if (std::strcmp(name, "sametoken_linear") == 0) {
    using Linear = int32_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, float, float, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t);
    return reinterpret_cast<Linear>(found)(w[0], w[1], w[2], w[3], as<float>(w[4]), as<float>(w[5]), w[6], w[7], w[8],
                                            w[9], w[10]);
  }
  using Words = int32_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
  return reinterpret_cast<Words>(found)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8]);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    const char* why = dlerror();
    (void)!write(2, why, std::strlen(why));
    return 2;
  }
  struct sigaction action {};
  action.sa_sigaction = missed;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  for (;;) {
    char name[32];
    uint64_t words[12];
    take(name, sizeof name);
    take(words, sizeof words);
    int32_t result = call(library, name, words);
    give_back();
    Message message{DONE, uint64_t(int64_t(result)), 0};
    give(&message, sizeof message);
  }
}
