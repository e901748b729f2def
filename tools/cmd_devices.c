/* SPDX-License-Identifier: Apache-2.0
 * evenkv devices: the device models, and what this machine has. */
#include "json.h"
#include "workload.h"

#include <inttypes.h>

static void print_head(cli_text *text)
{
    cli_print(text, "%-14s %7s %5s %9s %13s %9s %8s %9s %10s  %s\n", "device", "SMs", "arch", "CTAs/SM", "nominal GB/s",
              "read GB/s", "TFLOP/s", "L2 MiB", "memory GB", "constants");
}

static void print_row(cli_text *text, const ekv_device *device, const char *name, const char *note)
{
    cli_print(text, "%-14s %7d %5d %9d %13.0f %9.0f %8.0f %9.1f %10.1f  %s\n", name, device->num_sms, device->sm_arch,
              device->ctas_per_sm, device->read_gb_per_s_nominal, device->read_gb_per_s, device->bf16_tflops,
              (double)device->l2_bytes / 0x1p20, (double)device->memory_bytes / 1e9, note);
}

static void print_json(cli_text *text, const ekv_device *device, bool this_machine)
{
    cJSON *object = json_object();
    json_string(object, "name", device->name);
    json_bool(object, "this_machine", this_machine);
    json_int(object, "num_sms", device->num_sms);
    json_int(object, "sm_arch", device->sm_arch);
    json_int(object, "ctas_per_sm", device->ctas_per_sm);
    json_int(object, "request_cost_tokens", device->request_cost_tokens);
    json_real(object, "read_gb_per_s_nominal", device->read_gb_per_s_nominal);
    json_real(object, "read_gb_per_s", device->read_gb_per_s);
    json_real(object, "bf16_tflops", device->bf16_tflops);
    json_int(object, "l2_bytes", device->l2_bytes);
    json_int(object, "memory_bytes", device->memory_bytes);
    json_bool(object, "projected", device->projected);
    cJSON *systems = json_add_object(object, "systems");
    for (int32_t s = 0; s < EKV_NUM_SYSTEMS; s++)
        if (device->systems[s].cta_gb_per_s > 0) /* else nobody measured it */
            json_system(systems, (ekv_system)s, &device->systems[s]);
    json_print(text, object);
}

static void print_device(cli_state *cli, const ekv_device *device, bool this_machine)
{
    if (cli->options.json)
        print_json(&cli->out, device, this_machine);
    else
        print_row(&cli->out, device, this_machine ? "this machine" : device->name,
                  this_machine        ? device->name
                  : device->projected ? "projected"
                                      : "measured");
}

static ekv_status print_all(cli_state *cli)
{
    if (!cli->options.json)
        print_head(&cli->out);
    const char *name;
    for (int32_t i = 0; (name = ekv_device_name(i)); i++) {
        ekv_device device = EKV_DEVICE_INIT;
        ekv_status status = ekv_device_find(name, &device);
        if (status)
            return status;
        print_device(cli, &device, false);
    }
    ekv_device device = EKV_DEVICE_INIT;
    ekv_status status = ekv_device_detect(cli->context, &device);
    if (status)
        return status;
    print_device(cli, &device, true);
    if (!cli->options.json) {
        cli_print(&cli->out, "\n");
        cli_wrap(&cli->out, 0,
                 "0 stands for unknown or not measured; for the cpu, SMs are threads.  `evenkv devices --device NAME` "
                 "prints a model with the source of each constant, in the form that --device FILE takes.");
    }
    return EKV_OK;
}

static ekv_status devices_run(cli_state *cli)
{
    if (!cli->options.device)
        return print_all(cli);
    ekv_device device;
    ekv_status status = cli_device_read(cli, NULL, &device);
    if (status)
        return status;
    const char *text = ekv_device_text(cli->options.device);
    if (cli->options.json)
        print_json(&cli->out, &device, false);
    else if (text) {
        cli_print(&cli->out, "%s", text);
    } else {
        print_head(&cli->out);
        print_row(&cli->out, &device, device.name, device.projected ? "projected" : "measured");
    }
    return EKV_OK;
}

const cli_command cli_command_devices = {
    .name = "devices",
    .summary = "list the device models and what this machine has",
    .details = "Lists the built-in device models and what was found on this machine.  With --device it prints one of "
               "them, or checks a file: `key = value` lines with the keys that a built-in model shows.\n",
    .groups = CLI_DEVICE | CLI_JSON | CLI_OUTPUT,
    .run = devices_run,
};
