// libedit knows neither bracketed paste nor our interrupts: it gets its characters through read_char, which waits for
// keys, interrupts and other signals at once, and a function of ours is bound to the terminal's mark of a paste.
#include <fcntl.h>
#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "apps/reprise/line_reader.h"
#include "apps/reprise/output.h"
#include "apps/reprise/utf8.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

constexpr int kHistorySize = 1000;
constexpr const char* kPasteOn = "\033[?2004h";
constexpr const char* kPasteOff = "\033[?2004l";
constexpr std::wstring_view kPasteEnd = L"\033[201~";

std::atomic<int> signal_descriptor = -1;

void on_signal(int signal) {
  const int saved = errno;
  const auto byte = static_cast<char>(signal);
  [[maybe_unused]] const auto written = ::write(signal_descriptor.load(), &byte, 1);
  errno = saved;
}

// Signals that would leave the terminal in raw mode, or must redraw the line, for as long as a line is edited.
class EditingSignals {
 public:
  EditingSignals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) {
      struct sigaction action = {};
      action.sa_handler = on_signal;
      sigemptyset(&action.sa_mask);
      action.sa_flags = SA_RESTART;
      ::sigaction(kSignals[i], &action, &previous_[i]);
    }
  }
  ~EditingSignals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &previous_[i], nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH};
  struct sigaction previous_[std::size(kSignals)] = {};
};

// $XDG_STATE_HOME/reprise/history; empty where there is no place for it.
fs::path history_file() {
  const char* state = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  fs::path folder;
  if (state != nullptr && *state == '/') {
    folder = state;
  } else if (home != nullptr && *home != '\0') {
    folder = fs::path(home) / ".local" / "state";
  } else {
    return {};
  }
  std::error_code error;
  fs::create_directories(folder / "reprise", error);
  return error ? fs::path() : folder / "reprise" / "history";
}

// libedit converts by the locale; a machine without one set would lose every letter beyond ASCII.
void use_utf8_locale() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0) return;
  for (const char* name : {"C.UTF-8", "en_US.UTF-8", "UTF-8"}) {
    if (std::setlocale(LC_CTYPE, name) != nullptr) return;
  }
}

// Standard input's terminal once more, by a description of our own that never blocks: Ctrl-C empties the terminal's
// input, possibly after poll() has promised a byte and before read() would take it.
int open_keys() {
  const char* name = ::ttyname(STDIN_FILENO);
  const int descriptor = name == nullptr ? -1 : ::open(name, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  return descriptor < 0 ? STDIN_FILENO : descriptor;
}

class TerminalLineReader final : public LineReader {
 public:
  TerminalLineReader(Interrupts& interrupts, FILE* screen) : interrupts_(interrupts), screen_(screen) {
    use_utf8_locale();
    if (::pipe(signals_) != 0) signals_[0] = signals_[1] = -1;
    for (const int descriptor : signals_) {
      ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
      ::fcntl(descriptor, F_SETFL, O_NONBLOCK);
    }
    signal_descriptor = signals_[1];
    history_ = ::history_init();
    HistEvent event;
    ::history(history_, &event, H_SETSIZE, kHistorySize);
    ::history(history_, &event, H_SETUNIQUE, 1);
    if (!file_.empty()) ::history(history_, &event, H_LOAD, file_.c_str());

    edit_ = ::el_init("reprise", stdin, screen_, stderr);
    ::el_set(edit_, EL_CLIENTDATA, this);
    ::el_set(
        edit_, EL_PROMPT, +[](EditLine*) -> char* {
          static char prompt[] = ">> ";
          return prompt;
        });
    ::el_set(edit_, EL_EDITOR, "emacs");
    ::el_set(edit_, EL_HIST, ::history, history_);
    ::el_set(edit_, EL_GETCFN, &TerminalLineReader::read_char);
    // The wide form keeps the texts; the other would leak its copies.
    ::el_wset(edit_, EL_ADDFN, L"reprise-paste", L"Insert pasted text", &TerminalLineReader::paste);
    ::el_wset(edit_, EL_ADDFN, L"reprise-newline", L"Begin a new line of the message", &TerminalLineReader::new_line);
    ::el_set(edit_, EL_BIND, "\033[200~", "reprise-paste", nullptr);
    ::el_set(edit_, EL_BIND, "\033\r", "reprise-newline", nullptr);
    ::el_set(edit_, EL_BIND, "\033\n", "reprise-newline", nullptr);
    ::el_set(edit_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    ::el_source(edit_, nullptr);
    // The terminal would make signals of the keys for them even in the middle of pasted text, and drop what came
    // before.
    ::el_set(edit_, EL_SETTY, "-d", "-isig", nullptr);
    if (struct termios terminal = {}; ::tcgetattr(STDIN_FILENO, &terminal) == 0) {
      keys_of_signals_[0].key = terminal.c_cc[VINTR];
      keys_of_signals_[1].key = terminal.c_cc[VSUSP];
      keys_of_signals_[2].key = terminal.c_cc[VQUIT];
    }
  }

  ~TerminalLineReader() override {
    ::el_end(edit_);
    ::history_end(history_);
    signal_descriptor = -1;
    if (keys_ != STDIN_FILENO) ::close(keys_);
    for (const int descriptor : signals_) ::close(descriptor);
  }

  bool is_interactive() const override { return true; }

  Input read() override {
    interrupted_ = false;
    pasting_ = false;
    pending_.reset();
    ending_signal_ = 0;
    Input input;
    {
      const EditingSignals signals;
      put(kPasteOn);
      ::el_set(edit_, EL_PREP_TERM, 1);  // before the prompt, so that nothing typed at its sight is echoed twice
      int count = 0;
      const char* line = ::el_gets(edit_, &count);
      put(kPasteOff);
      if (interrupted_) {
        put("^C\n");
        input.kind = Input::Kind::interrupted;
      } else if (line == nullptr || count <= 0) {
        put("\n");
      } else {
        input = {Input::Kind::text, std::string(line, static_cast<std::size_t>(count))};
      }
    }
    if (ending_signal_ != 0) ::raise(ending_signal_);  // the terminal is as it was, and the signal's own action is back
    while (input.text.ends_with('\n') || input.text.ends_with('\r')) input.text.pop_back();
    remember(input.text);
    return input;
  }

 private:
  static TerminalLineReader& self(EditLine* edit) {
    void* reader = nullptr;
    ::el_get(edit, EL_CLIENTDATA, &reader);
    return *static_cast<TerminalLineReader*>(reader);
  }

  // libedit's contract: 1 and a character, 0 at the end, -1 for an error (which ends el_gets).
  static int read_char(EditLine* edit, wchar_t* out) { return self(edit).next(*out); }

  int next(wchar_t& out) {
    unsigned char lead = 0;
    do {
      if (const int got = next_byte(lead); got != 1) return got;
    } while (raise_signal_of(lead));
    const int length = utf8_length(lead);
    std::string bytes(1, static_cast<char>(lead));
    while (static_cast<int>(bytes.size()) < length) {
      unsigned char byte = 0;
      if (const int got = next_byte(byte); got != 1) return got;
      if ((byte & 0xC0) != 0x80) {  // the character was never finished; this is the next one
        pending_ = byte;
        break;
      }
      bytes += static_cast<char>(byte);
    }
    if (!is_valid_utf8(bytes)) {
      out = L'\uFFFD';
      return 1;
    }
    unsigned code = length == 1 ? lead : lead & (0x7Fu >> length);
    for (int i = 1; i < length; ++i) {
      code = (code << 6) | (static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]) & 0x3Fu);
    }
    out = static_cast<wchar_t>(code);
    return 1;
  }

  // The signal comes back through the same wait as one from outside. Returns: whether the key stands for one.
  bool raise_signal_of(unsigned char key) {
    if (pasting_ || key == _POSIX_VDISABLE) return false;
    for (const auto& known : keys_of_signals_) {
      if (key != known.key) continue;
      ::raise(known.signal);
      return true;
    }
    return false;
  }

  int next_byte(unsigned char& byte) {
    if (pending_) {
      byte = *std::exchange(pending_, std::nullopt);
      return 1;
    }
    for (;;) {
      pollfd waiting[3] = {{keys_, POLLIN, 0}, {interrupts_.wake_descriptor(), POLLIN, 0}, {signals_[0], POLLIN, 0}};
      if (::poll(waiting, 3, -1) < 0) {
        if (errno == EINTR) continue;
        return -1;
      }
      if ((waiting[1].revents & POLLIN) != 0) {
        interrupts_.take_wake();
        interrupted_ = true;
        errno = EINTR;
        return -1;
      }
      if ((waiting[2].revents & POLLIN) != 0 && !handle_signals()) return -1;
      if ((waiting[0].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
      const ssize_t got = ::read(keys_, &byte, 1);
      if (got == 1) return 1;
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      return got == 0 ? 0 : -1;
    }
  }

  // Returns: false when a signal ends the program.
  bool handle_signals() {
    char signal = 0;
    while (::read(signals_[0], &signal, 1) == 1) {
      if (signal == SIGWINCH) {
        ::el_resize(edit_);
      } else if (signal == SIGTSTP) {
        suspend();
      } else {
        ending_signal_ = static_cast<unsigned char>(signal);
        return false;
      }
    }
    return true;
  }

  // The terminal goes back to the shell for as long as we are stopped.
  void suspend() {
    ::el_set(edit_, EL_PREP_TERM, 0);
    put(kPasteOff);
    struct sigaction stop = {};
    struct sigaction ours = {};
    stop.sa_handler = SIG_DFL;
    ::sigaction(SIGTSTP, &stop, &ours);
    ::raise(SIGTSTP);
    ::sigaction(SIGTSTP, &ours, nullptr);
    put(kPasteOn);
    ::el_set(edit_, EL_PREP_TERM, 1);
    ::el_set(edit_, EL_REFRESH);
  }

  // Takes characters up to the end mark as text, newlines included, so that nothing pasted acts as a key.
  static unsigned char paste(EditLine* edit, int) {
    std::wstring text;
    self(edit).pasting_ = true;
    while (!text.ends_with(kPasteEnd)) {
      wchar_t c = 0;
      if (::el_wgetc(edit, &c) != 1) return CC_EOF;
      text += c;
    }
    self(edit).pasting_ = false;
    text.resize(text.size() - kPasteEnd.size());
    std::wstring clean;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == L'\r') {
        clean += L'\n';
        if (i + 1 < text.size() && text[i + 1] == L'\n') ++i;
      } else if (text[i] == L'\n' || text[i] == L'\t' || (text[i] >= 0x20 && text[i] != 0x7F)) {
        clean += text[i];
      }
    }
    if (!clean.empty()) ::el_winsertstr(edit, clean.c_str());
    return CC_REFRESH;
  }

  static unsigned char new_line(EditLine* edit, int) {
    ::el_winsertstr(edit, L"\n");
    return CC_REFRESH;
  }

  void put(const char* text) {
    std::fputs(text, screen_);
    std::fflush(screen_);
  }

  void remember(const std::string& text) {
    if (text.find_first_not_of(" \t\n") == std::string::npos) return;
    HistEvent event;
    ::history(history_, &event, H_ENTER, text.c_str());
    if (file_.empty()) return;
    const auto mask = ::umask(0077);  // what was asked is nobody else's business
    ::history(history_, &event, H_SAVE, file_.c_str());
    ::umask(mask);
  }

  Interrupts& interrupts_;
  FILE* screen_;
  fs::path file_ = history_file();
  History* history_ = nullptr;
  EditLine* edit_ = nullptr;
  const int keys_ = open_keys();
  int signals_[2] = {-1, -1};
  struct SignalKey {
    int signal;
    unsigned char key;
  };
  SignalKey keys_of_signals_[3] = {{SIGINT, '\003'}, {SIGTSTP, '\032'}, {SIGQUIT, '\034'}};
  std::optional<unsigned char> pending_;  // read, and not yet part of a character
  bool pasting_ = false;
  bool interrupted_ = false;
  int ending_signal_ = 0;
};

}  // namespace

std::unique_ptr<LineReader> make_terminal_line_reader(Interrupts& interrupts) {
  if (::isatty(STDIN_FILENO) == 0) return nullptr;
  FILE* screen = ::isatty(STDOUT_FILENO) == 1 ? stdout : ::isatty(STDERR_FILENO) == 1 ? stderr : nullptr;
  if (screen == nullptr) return nullptr;
  return std::make_unique<TerminalLineReader>(interrupts, screen);
}

}  // namespace reprise::app
