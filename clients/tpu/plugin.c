/* A PJRT plugin that is XLA's plugin for CPUs with other options.
 *
 * TorchTPU creates its client with options for a TPU, which the CPU plugin rejects. This one replaces them with
 * "cpu_device_count", 1, and passes everything else on. PACELINE_CPU_PLUGIN is the path of the CPU plugin.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

static PJRT_Client_Create *create_on_cpu;

static PJRT_Error *create(PJRT_Client_Create_Args *arguments) {
  static const char name[] = "cpu_device_count";
  PJRT_NamedValue one = {
      .struct_size = PJRT_NamedValue_STRUCT_SIZE,
      .name = name,
      .name_size = sizeof name - 1,
      .type = PJRT_NamedValue_kInt64,
      .int64_value = 1,
      .value_size = 1,
  };
  const PJRT_NamedValue *options = arguments->create_options;
  size_t count = arguments->num_options;
  arguments->create_options = &one;
  arguments->num_options = 1;
  PJRT_Error *error = create_on_cpu(arguments);
  arguments->create_options = options;
  arguments->num_options = count;
  return error;
}

static void fail(const char *reason) {
  fprintf(stderr, "The CPU plugin of PACELINE_CPU_PLUGIN cannot be loaded: %s\n", reason);
  abort();
}

const PJRT_Api *GetPjrtApi(void) {
  static PJRT_Api *api;
  if (api != NULL) return api;
  const char *path = getenv("PACELINE_CPU_PLUGIN");
  void *plugin = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (plugin == NULL) fail(path == NULL ? "the variable is not set" : dlerror());
  const PJRT_Api *(*get)(void) = (const PJRT_Api *(*)(void))dlsym(plugin, "GetPjrtApi");
  if (get == NULL) fail(dlerror());
  const PJRT_Api *theirs = get();
  api = malloc(theirs->struct_size); /* may be newer, and so larger, than the header's */
  if (api == NULL) fail("no memory");
  memcpy(api, theirs, theirs->struct_size);
  create_on_cpu = theirs->PJRT_Client_Create;
  api->PJRT_Client_Create = create;
  return api;
}
