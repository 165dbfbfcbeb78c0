# Everything from outside, found once. MLX_DIR names the CMake package of an MLX wheel or of a build of one's own
# (`./run` sets it); CMake's own search is the fallback.

# A project that adds this one with add_subdirectory links the static rooms, and so needs these targets too.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)

find_package(Threads REQUIRED)
find_package(OpenSSL COMPONENTS Crypto)
find_package(nlohmann_json 3.11)
if(NOT OPENSSL_FOUND OR NOT nlohmann_json_FOUND)
  message(FATAL_ERROR
    "The headers of OpenSSL and of nlohmann-json 3.11 or newer are needed. Debian and Ubuntu: "
    "apt-get install libssl-dev nlohmann-json3-dev. macOS: brew install openssl@3 nlohmann-json.")
endif()
if(NOT TARGET hwy::hwy)
  find_package(hwy 1.0.3 CONFIG)
endif()
if(NOT TARGET hwy::hwy)
  message(FATAL_ERROR
    "Highway 1.0.3 or newer is needed. Debian and Ubuntu: apt-get install libhwy-dev. macOS: brew install highway.")
endif()
find_package(MLX 0.32 REQUIRED CONFIG)
include(RepriseMLX)

if(REPRISE_BUILD_TESTS)
  find_package(GTest 1.12 REQUIRED)
  include(GoogleTest)
endif()

add_library(reprise_mlx INTERFACE)
add_library(reprise::mlx ALIAS reprise_mlx)
set_target_properties(reprise_mlx PROPERTIES EXPORT_NAME mlx)
target_link_libraries(reprise_mlx INTERFACE mlx reprise_openblas)

