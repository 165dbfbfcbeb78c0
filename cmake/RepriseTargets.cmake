# reprise_room(NAME SOURCES … HEADERS … [PRIVATE_HEADERS …] LINK … PRIVATE_LINK …): one room = one static library
# reprise_NAME, alias reprise::NAME. HEADERS are exactly what is installed.
add_library(reprise_warnings INTERFACE)
target_compile_options(reprise_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual)
if(REPRISE_SANITIZE)
  target_compile_options(reprise_warnings INTERFACE -fsanitize=${REPRISE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(reprise_warnings INTERFACE -fsanitize=${REPRISE_SANITIZE})
endif()

set(REPRISE_ROOMS "" CACHE INTERNAL "")

function(reprise_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;HEADERS;LINK;PRIVATE_LINK" ${ARGN})
  set(target reprise_${name})
  add_library(${target} STATIC)
  add_library(reprise::${name} ALIAS ${target})
  target_sources(${target}
    PRIVATE ${ROOM_SOURCES}
    PUBLIC FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${ROOM_HEADERS})
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${target} PUBLIC ${ROOM_LINK} PRIVATE ${ROOM_PRIVATE_LINK} $<BUILD_INTERFACE:reprise_warnings>)
  set(REPRISE_ROOMS ${REPRISE_ROOMS} ${target} CACHE INTERNAL "")
endfunction()

# reprise_test(ROOM LABEL FILE … [LINK …]): one test program ROOM_LABEL_tests whose tests carry the ctest label.
# Labels: unit (no MLX), mlx (tiny arrays), golden (equal to mlx-lm), model (needs the small model), install, fuzz.
function(reprise_test room label)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LINK" ${ARGN})
  set(target ${room}_${label}_tests)
  add_executable(${target} ${TEST_SOURCES})
  target_link_libraries(${target} PRIVATE ${TEST_LINK} reprise_warnings GTest::gtest GTest::gtest_main)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(${target} PRIVATE REPRISE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  gtest_discover_tests(${target} PROPERTIES LABELS ${label} TIMEOUT ${TEST_TIMEOUT} DISCOVERY_TIMEOUT 60)
endfunction()
