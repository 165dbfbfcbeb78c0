# cmake -DREPLAY=… -DSOURCE_DIR=… -P run_traces.cmake: replays the full traces where they are, else
# the committed subset.
set(folder "${SOURCE_DIR}/tests/data/conformance")
foreach(candidate "$ENV{REPRISE_TEST_DATA}/conformance" "${SOURCE_DIR}/../shared/conformance")
  if(EXISTS "${candidate}/index.json")
    set(folder "${candidate}")
    break()
  endif()
endforeach()
message(STATUS "traces: ${folder}")
execute_process(COMMAND "${REPLAY}" "${folder}" COMMAND_ERROR_IS_FATAL ANY)
