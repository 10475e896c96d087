// SPDX-License-Identifier: BSL-1.0
// Programs and shared objects that each have the library, compiled once or in headers: none of them touches
// another one's, and any may be unloaded.
#include "../uneven_inputs.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdio>

namespace {

struct Plugin {
    char const* path;
    char const* function;
    void* handle = nullptr;
};

bool runs(Plugin const& plugin) {
    auto* const run = reinterpret_cast<bool (*)()>(dlsym(plugin.handle, plugin.function));
    return run != nullptr && run();
}

} // namespace

int main() {
    std::array<Plugin, 4> plugins{{
        {PLUGIN_compiled_1, "run_compiled"},
        {PLUGIN_joinable_1, "run_joinable"},
        {PLUGIN_compiled_2, "run_compiled"},
        {PLUGIN_joinable_2, "run_joinable"},
    }};
    bool is_right = uneven_inputs_run();
    for (Plugin& plugin : plugins) {
        plugin.handle = dlopen(plugin.path, RTLD_NOW | RTLD_GLOBAL);
        if (plugin.handle == nullptr) {
            std::puts(dlerror());
            return 1;
        }
        is_right = runs(plugin) && is_right;
    }
    for (std::size_t i = 0; i < plugins.size(); ++i) { // what is left still runs
        dlclose(plugins[i].handle);
        for (std::size_t k = i + 1; k < plugins.size(); ++k) {
            is_right = runs(plugins[k]) && is_right;
        }
        is_right = uneven_inputs_run() && is_right;
    }
    if (!is_right) {
        std::puts("ranks with uneven inputs got wrong sums");
        return 1;
    }
}
