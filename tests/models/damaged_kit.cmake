# cmake -DREPLAY=… -DMODEL=… -DWORK_DIR=… -P damaged_kit.cmake: what model_replay does with a folder that is damaged, or
# whose outputs are others. Each must be told as a failure of that folder, with exit status 1.
file(REMOVE_RECURSE "${WORK_DIR}")

function(fails_with name text)
  execute_process(COMMAND "${REPLAY}" "${WORK_DIR}/${name}" OUTPUT_VARIABLE output RESULT_VARIABLE result)
  if(NOT result EQUAL 1)
    message(FATAL_ERROR "${name}: exit status ${result}, must be 1:\n${output}")
  endif()
  if(NOT output MATCHES "FAILED [^\n]*${text}" OR NOT output MATCHES "[0-9]+ passed, [0-9]+ failed\n$")
    message(FATAL_ERROR "${name}: the output must tell of \"${text}\", and count:\n${output}")
  endif()
endfunction()

function(copy_model name)
  file(COPY "${MODEL}/" DESTINATION "${WORK_DIR}/${name}")
endfunction()

function(replace_in file from to)
  file(READ "${file}" text)
  string(REGEX REPLACE "${from}" "${to}" changed "${text}")
  if(changed STREQUAL text)
    message(FATAL_ERROR "${file}: nothing to replace")
  endif()
  file(WRITE "${file}" "${changed}")
endfunction()

copy_model(no_expectations)
file(REMOVE "${WORK_DIR}/no_expectations/expected.json")
fails_with(no_expectations "expected.json")

copy_model(no_arrays)
file(REMOVE "${WORK_DIR}/no_arrays/expected.safetensors")
fails_with(no_arrays "expected.safetensors")

copy_model(no_weights)
file(REMOVE "${WORK_DIR}/no_weights/model.safetensors")
fails_with(no_weights "model.safetensors")

copy_model(cut_json)
file(READ "${WORK_DIR}/cut_json/expected.json" text LIMIT 2000)
file(WRITE "${WORK_DIR}/cut_json/expected.json" "${text}")
fails_with(cut_json "parse")

copy_model(unknown_array)
replace_in("${WORK_DIR}/unknown_array/expected.json" "\"main.logits\"" "\"no_such\"")
fails_with(unknown_array "no array .no_such.")

copy_model(unknown_model)
replace_in("${WORK_DIR}/unknown_model/config.json" "\"model_type\": *\"[a-z0-9_]*\"" "\"model_type\": \"no_such\"")
fails_with(unknown_model "no_such")

copy_model(other_caches)
replace_in("${WORK_DIR}/other_caches/expected.json" "\"nbytes\": *[0-9]+" "\"nbytes\": 1")
fails_with(other_caches "caches after prefill: layer 0.nbytes")

copy_model(other_tokens)
replace_in("${WORK_DIR}/other_tokens/expected.json" "\"tokens\": *\\[[0-9]+, *[0-9]+" "\"tokens\": [3, 5")
fails_with(other_tokens "decode: at ")

copy_model(other_prompt)
replace_in("${WORK_DIR}/other_prompt/expected.json" "\"prompt\": *\\[[0-9]+" "\"prompt\": [3")
fails_with(other_prompt "logits: at ")
