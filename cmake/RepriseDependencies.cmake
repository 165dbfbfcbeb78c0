# Everything from outside, found once. MLX_DIR names the CMake package of an MLX wheel or of a build of one's own
# (`./run` sets it); CMake's own search is the fallback.
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(MLX 0.32 REQUIRED CONFIG)
include(RepriseOpenBLAS)

if(REPRISE_BUILD_TESTS)
  find_package(GTest 1.12 REQUIRED)
  include(GoogleTest)
endif()
