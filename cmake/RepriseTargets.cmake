# What every target of this project shares, and the functions that make rooms and test programs.

# Warnings and sanitizers: for our own targets only, never for those who link us.
add_library(reprise_warnings INTERFACE)
target_compile_options(reprise_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual
  # GCC 12 sees overlaps in std::string's operator+, and members of unset variants read, where there are none.
  "$<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict;-Wno-maybe-uninitialized>")
if(REPRISE_SANITIZE)
  target_compile_options(reprise_warnings INTERFACE
    -fsanitize=${REPRISE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(reprise_warnings INTERFACE -fsanitize=${REPRISE_SANITIZE})
endif()

# Header-only libraries that only our .cpp files see: whoever links an installed room need not have them.
set(REPRISE_HEADER_ONLY nlohmann_json::nlohmann_json CLI11::CLI11)

set_property(GLOBAL PROPERTY REPRISE_ROOMS "")

# reprise_room(NAME SOURCES … HEADERS … LINK … PRIVATE_LINK …): one room = one static library reprise_NAME, used by its
# alias reprise::NAME. HEADERS are exactly what is installed; headers for this room alone are named in SOURCES.
function(reprise_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;HEADERS;LINK;PRIVATE_LINK" ${ARGN})
  if(ROOM_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "reprise_room(${name}): what is \"${ROOM_UNPARSED_ARGUMENTS}\"?")
  endif()
  set(target reprise_${name})
  set(private_link)
  foreach(library IN LISTS ROOM_PRIVATE_LINK)
    if(library IN_LIST REPRISE_HEADER_ONLY)
      set(library $<BUILD_INTERFACE:${library}>)
    endif()
    list(APPEND private_link ${library})
  endforeach()
  add_library(${target} STATIC)
  add_library(reprise::${name} ALIAS ${target})
  target_sources(${target}
    PRIVATE ${ROOM_SOURCES}
    PUBLIC FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${ROOM_HEADERS})
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${target} PUBLIC ${ROOM_LINK} PRIVATE ${private_link} $<BUILD_INTERFACE:reprise_warnings>)
  set_property(GLOBAL APPEND PROPERTY REPRISE_ROOMS ${target})
endfunction()

# One target for each label, to build only the tests that a preset runs.
set(REPRISE_TEST_LABELS unit mlx golden model server python install fuzz)
if(REPRISE_BUILD_TESTS)
  foreach(label IN LISTS REPRISE_TEST_LABELS)
    add_custom_target(tests_${label})
  endforeach()
endif()

# reprise_test(ROOM LABEL SOURCES … LINK … [TIMEOUT seconds]): one test program ROOM_LABEL_tests whose tests carry the
# ctest label. Labels: unit (no MLX), mlx (tiny arrays), golden (equal to mlx-lm), model (needs the small model), server
# (loopback only), install, fuzz.
function(reprise_test room label)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;LINK" ${ARGN})
  if(TEST_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "reprise_test(${room} ${label}): what is \"${TEST_UNPARSED_ARGUMENTS}\"?")
  endif()
  if(NOT label IN_LIST REPRISE_TEST_LABELS)
    message(FATAL_ERROR "reprise_test(${room} ${label}): the labels are ${REPRISE_TEST_LABELS}")
  endif()
  set(target ${room}_${label}_tests)
  add_executable(${target} ${TEST_SOURCES})
  target_link_libraries(${target} PRIVATE ${TEST_LINK} reprise_warnings GTest::gtest GTest::gtest_main)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(${target} PRIVATE REPRISE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_dependencies(tests_${label} ${target})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  gtest_discover_tests(${target} PROPERTIES LABELS ${label} TIMEOUT ${TEST_TIMEOUT} DISCOVERY_TIMEOUT 60)
endfunction()
