#include "reprise/base/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace reprise {
namespace {

// The examples of FIPS 180-4 and the empty message.
TEST(Sha256, KnownDigestsAreMet) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheDigestOfTheWhole) {
  Sha256 hash;
  for (const char* piece : {"", "a", "bc"}) hash.update(piece);
  EXPECT_EQ(hash.hex_digest(), sha256_hex("abc"));
}

TEST(Sha256, AMovedObjectGoesOn) {
  Sha256 first;
  first.update("ab");
  Sha256 second = std::move(first);
  second.update("c");
  EXPECT_EQ(second.hex_digest(), sha256_hex("abc"));
}

TEST(Sha256, ZeroBytesCount) {
  using namespace std::string_view_literals;
  EXPECT_NE(sha256_hex("a\0b"sv), sha256_hex("a"));
}

}  // namespace
}  // namespace reprise
