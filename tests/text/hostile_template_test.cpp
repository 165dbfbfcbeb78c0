// Templates made to do harm end with an error and with bounded memory; one that does not end runs into ctest's limit.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "reprise/base/error.h"
#include "reprise/text/chat_template.h"

namespace reprise {
namespace {

std::string repeated(const std::string& text, int count) {
  std::string joined;
  for (int i = 0; i < count; ++i) joined += text;
  return joined;
}

std::string rendered(const std::string& source) {
  TokenizerData data;
  data.chat_template = source;
  return ChatTemplate(data).render({});
}

// A loop of `count` rounds over `body`, in which `ns.x` starts as `start`.
std::string rounds(const std::string& start, const std::string& body, int count = 100) {
  return "{% set ns = namespace(x=" + start + ") %}{% for i in range(" + std::to_string(count) + ") %}" + body +
         "{% endfor %}";
}

class HostileTemplate : public ::testing::TestWithParam<std::pair<const char*, std::string>> {};

TEST_P(HostileTemplate, EndsWithAnError) {
  try {
    const std::string text = rendered(GetParam().second);
    ADD_FAILURE() << "rendered " << text.size() << " bytes";
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::resource_exhausted || error.code() == ErrorCode::corrupt_data ||
                error.code() == ErrorCode::invalid_argument)
        << error.what();
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 2L << 20) << "KiB";
}

INSTANTIATE_TEST_SUITE_P(
    Loops, HostileTemplate,
    ::testing::Values(
        std::pair("nested", repeated("{% for a in range(100000) %}", 3) + repeated("{% endfor %}", 3)),
        std::pair("huge_range", std::string("{% for a in range(10**9) %}x{% endfor %}")),
        std::pair("macro_in_itself", std::string("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")),
        std::pair("macro_in_brackets",
                  std::string("{% macro f(n) %}{{ ((((((f(n)))))) ~ n) }}{% endmacro %}{{ f(1) }}")),
        std::pair(
            "macro_tree",
            std::string("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}")),
        std::pair("recursive_loop", std::string("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}")),
        std::pair("search", "{% set x = 'a' * 10000000 %}" + rounds("0", "{{ 'b' in x }}", 100000))),
    [](const auto& made) { return std::string(made.param.first); });

INSTANTIATE_TEST_SUITE_P(
    Memory, HostileTemplate,
    ::testing::Values(std::pair("doubling_by_tilde", rounds("'aaaaaaaa'", "{% set ns.x = ns.x ~ ns.x %}")),
                      std::pair("doubling_by_plus", rounds("'aaaaaaaa'", "{% set ns.x = ns.x + ns.x %}")),
                      std::pair("doubling_lists", rounds("[1]", "{% set ns.x = ns.x + ns.x %}")),
                      std::pair("doubling_by_block",
                                rounds("'aaaaaaaa'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}")),
                      std::pair("doubling_without_loop", "{% set x = 'aaaa' %}" + repeated("{% set x = x ~ x %}", 60)),
                      std::pair("repeated_string", std::string("{{ 'a' * 10**9 }}")),
                      std::pair("repeated_list", std::string("{{ ([0] * 10**12) | length }}")),
                      std::pair("constants",
                                std::string("{{ ('a' * 100000000) ~ ('a' * 100000000) ~ ('a' * 100000000) }}")),
                      std::pair("replace", std::string("{% set x = 'a' * 100000 %}{{ x.replace('a', x) | length }}")),
                      std::pair("replace_nothing", std::string("{{ ('a' * 1000000).replace('', 'b' * 1000) }}")),
                      std::pair("join", std::string("{% set x = 'a' * 100000 %}{{ x | join(x) }}")),
                      std::pair("split", std::string("{{ ('a,' * 50000000).split(',') | length }}")),
                      std::pair("characters", std::string("{{ ('a' * 100000000) | list | length }}")),
                      std::pair("indent", std::string("{{ 'a\n' * 1000 | indent(10**12) }}")),
                      std::pair("indented_json", std::string("{{ [[[1]]] | tojson(indent=10**12) }}")),
                      std::pair("width", std::string("{{ '%1000000000000d' % 1 }}")),
                      std::pair("precision", std::string("{{ '%.999999999f' % 1.5 }}")),
                      std::pair("center", std::string("{{ 'a' | center(10**12) }}")),
                      std::pair("batch", std::string("{{ [1] | batch(10**15, 0) }}")),
                      std::pair("output", rounds("0", "{{ 'a' * 100000 }}", 100000))),
    [](const auto& made) { return std::string(made.param.first); });

INSTANTIATE_TEST_SUITE_P(
    Depth, HostileTemplate,
    ::testing::Values(
        std::pair("brackets", "{{ " + repeated("(", 100000) + "1" + repeated(")", 100000) + " }}"),
        std::pair("chain", "{{ 1" + repeated(" ~ 1", 100000) + " }}"),
        std::pair("attributes", "{{ a" + repeated(".b", 100000) + " }}"),
        std::pair("filters", "{{ a" + repeated(" | upper", 100000) + " }}"),
        std::pair("nots", "{{ " + repeated("not ", 100000) + "1 }}"),
        std::pair("elifs", "{% if 0 %}" + repeated("{% elif 0 %}", 100000) + "{% endif %}"),
        std::pair("fewer_elifs", "{% if 0 %}" + repeated("{% elif 0 %}", 4990) + "{% endif %}"),
        std::pair("ifs", repeated("{% if 1 %}", 2000) + repeated("{% endif %}", 2000)),
        std::pair("lists_in_lists", rounds("[1]", "{% set ns.x = [ns.x] %}", 100000)),
        std::pair("methods_in_lists", rounds("[1]", "{% set ns.x = [ns.x].copy %}", 100000)),
        std::pair("shared_lists_printed", rounds("[1]", "{% set ns.x = [ns.x, ns.x] %}", 60) + "{{ ns.x }}"),
        std::pair("shared_lists_compared", rounds("[1]", "{% set ns.x = [ns.x, ns.x] %}", 60) + "{% set y = ns.x %}" +
                                               rounds("[1]", "{% set ns.x = [ns.x, ns.x] %}", 60) + "{{ y == ns.x }}"),
        std::pair("shared_dicts_as_json",
                  rounds("{}", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}", 60) + "{{ ns.x | tojson }}")),
    [](const auto& made) { return std::string(made.param.first); });

// What looks like harm but is none must not crash either, above all when it is dropped.
TEST(HarmlessTemplate, CyclesAndLongChainsOfNamespacesAreDroppedSafely) {
  EXPECT_EQ(rendered("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns.x.x.x is defined }}"), "True");
  EXPECT_EQ(rendered(rounds("0", "{% set m = namespace(x=ns.x) %}{% set ns.x = m %}", 90000) + "ok"), "ok");
  EXPECT_EQ(rendered(rounds("0", "{% for y in [ns.x] %}{% set ns.x = loop %}{% endfor %}", 90000) + "ok"), "ok");
  EXPECT_EQ(
      rendered(rounds("0", "{% set y = ns.x %}{% for z in [1] %}{% set ns.x = loop %}{% endfor %}", 90000) + "ok"),
      "ok");
}

TEST(HarmlessTemplate, EdgesOfNumbersAndTextsAreNoPanics) {
  for (const char* source : {"{{ 'abc'.count('') }}", "{{ 'abc'[-10**30:10**30] }}", "{{ ('a' * 1000)[::10**30] }}",
                             "{{ ''|capitalize }}", "{{ (-170141183460469231731687303715884105727 - 1) | string }}",
                             "{{ 'é'[0:1] }}{{ 'é'[::-1] }}", "{{ range(-10**38, 10**38, 10**38) | list }}",
                             "{{ strftime_now('%Q%') | length }}", "{{ '\\u200b'.strip() }}"}) {
    EXPECT_NO_THROW(rendered(source)) << source;
  }
  for (const char* source :
       {"{{ -(-170141183460469231731687303715884105727 - 1) }}",
        "{{ (-170141183460469231731687303715884105727 - 1) | abs }}",
        "{{ 170141183460469231731687303715884105727 + 1 }}", "{{ 10 ** 10 ** 10 }}",
        "{{ (-170141183460469231731687303715884105727 - 1) // -1 }}", "{{ 1 % 0 }}", "{{ 'abc'[::0] }}",
        "{{ [1] | map(x=1) }}", "{{ {[1]: 2} }}", "{{ strftime_now('a\\x00b') }}"}) {
    try {
      rendered(source);
      ADD_FAILURE() << source;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << source << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace reprise
