/* SPDX-License-Identifier: Apache-2.0
 * What a decode costs most in Python, as two builtin functions: describing its tensors and entering ekv_decode.
 *
 * Neither torch nor Python is compiled in.  Tensors are read through the function table that their type shows as
 * __dlpack_c_exchange_api__ (DLPack 1.2, include/dlpack/dlpack.h of dmlc/dlpack).  Of Python only functions of its
 * stable ABI (PEP 384) are used; they are declared here, and the interpreter that loads this file has them. */
#include "evenkv/evenkv.h"

#include <stdbool.h>
#include <string.h>

/* ---- Python's stable ABI --------------------------------------------------------------------------------- */

typedef struct PyObject PyObject;
typedef struct PyThreadState PyThreadState;
typedef PyObject *(*builtin)(PyObject *self, PyObject *const *arguments, intptr_t count);
typedef struct PyMethodDef {
    const char *name;
    builtin function;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_FASTCALL = 0x80 };

PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyTuple_New(intptr_t size);
int PyTuple_SetItem(PyObject *tuple, intptr_t index, PyObject *item); /* takes over the reference */
PyObject *PyBytes_FromStringAndSize(const char *text, intptr_t size);
char *PyBytes_AsString(PyObject *bytes);
PyObject *PyLong_FromLong(long value);
PyObject *PyLong_FromVoidPtr(void *value);
void *PyLong_AsVoidPtr(PyObject *value);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_Format(PyObject *exception, const char *format, ...);
void Py_DecRef(PyObject *object);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *thread);
extern PyObject *PyExc_TypeError;

/* ---- DLPack's exchange API ------------------------------------------------------------------------------- */

typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t num_dims;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    const int64_t *shape, *strides; /* [num_dims], strides in elements */
    uint64_t byte_offset;
} dl_tensor;

typedef struct exchange_api {
    uint32_t major, minor;
    const struct exchange_api *older;
    void *managed[3];
    /* A view for as long as the caller holds on to the object.  Returns 0, or -1 and sets Python's exception. */
    int (*view)(PyObject *object, dl_tensor *tensor);
} exchange_api;
enum { EXCHANGE_MAJOR = 1 };

static const exchange_api *exchange;
static PyObject *none;

/* ---- describe -------------------------------------------------------------------------------------------- */

/* In the order of ekv_tensors.  Of python/evenkv/_calls.py too. */
typedef enum place { Q, K, V, KV_LEN, TABLE, INDICES, TABLE_ROWS, O, LSE, NUM_PLACES } place;

enum {
    MAX_DIMS = 8, /* of those beyond no decode takes any */
    WORDS = 2,    /* device; dimensions and type */
    MAX_WORDS = NUM_PLACES * (WORDS + 2 * MAX_DIMS),
};

/* Appends what the tensor is, all but its address. */
static int64_t *append(const dl_tensor *tensor, int64_t *end)
{
    const int32_t num_dims = tensor->num_dims;
    *end++ = (int64_t)tensor->device_type << 32 | (uint32_t)tensor->device_id;
    *end++ = (int64_t)num_dims << 32 | (int64_t)tensor->type_lanes << 16 | tensor->type_bits << 8 | tensor->type_code;
    for (int32_t i = 0; i < num_dims && i < MAX_DIMS; i++) {
        *end++ = tensor->shape[i];
        *end++ = tensor->strides[i];
    }
    return end;
}

static PyObject *pair(PyObject *first, PyObject *second)
{
    PyObject *made = first && second ? PyTuple_New(2) : NULL;
    if (!made) {
        Py_DecRef(first);
        Py_DecRef(second);
        return NULL;
    }
    PyTuple_SetItem(made, 0, first);
    PyTuple_SetItem(made, 1, second);
    return made;
}

/* describe(q, k, v, kv_len, table, indices, table_rows, o, lse): tensors or None.  Returns two bytes objects: what
 * they are, equal for calls alike, and their addresses. */
static PyObject *describe(PyObject *self, PyObject *const *arguments, intptr_t count)
{
    (void)self;
    if (count != NUM_PLACES)
        return PyErr_Format(PyExc_TypeError, "describe takes %d arguments", (int)NUM_PLACES);
    int64_t words[MAX_WORDS], *end = words;
    const char *addresses[NUM_PLACES] = { 0 };
    for (int32_t i = 0; i < NUM_PLACES; i++) {
        if (arguments[i] == none) {
            *end++ = -1;
            continue;
        }
        dl_tensor tensor;
        if (exchange->view(arguments[i], &tensor))
            return NULL;
        addresses[i] = tensor.data ? (const char *)tensor.data + tensor.byte_offset : NULL;
        end = append(&tensor, end);
    }
    return pair(PyBytes_FromStringAndSize((const char *)words, (end - words) * (intptr_t)sizeof *words),
                PyBytes_FromStringAndSize((const char *)addresses, sizeof addresses));
}

/* ---- launch ---------------------------------------------------------------------------------------------- */

typedef ekv_status decode_function(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                                   void *workspace, size_t workspace_size);

/* A table without entries is not read, but may not be NULL either: any address will do. */
static void set_addresses(void *const *addresses, bool csr, ekv_tensors *tensors)
{
    void *const table = addresses[TABLE] ? addresses[TABLE] : addresses[Q];
    tensors->q = addresses[Q];
    tensors->k = addresses[K];
    tensors->v = addresses[V];
    tensors->o = addresses[O];
    tensors->lse = addresses[LSE];
    tensors->block_table = csr ? NULL : table;
    tensors->block_table_rows = addresses[TABLE_ROWS];
    tensors->page_indptr = csr ? table : NULL;
    tensors->page_indices = !csr ? NULL : addresses[INDICES] ? addresses[INDICES] : table;
}

/* launch(plan, tensors, options, workspace, workspace_size, addresses, planning, csr): ekv_decode with the tensors at
 * the addresses of describe; the strides and the rest are those of `tensors`.  planning: whether to hand it kv_len.
 * All but addresses are ints.  self: address of ekv_decode.  Other Python threads run meanwhile.  Returns the status.
 */
static PyObject *launch(PyObject *self, PyObject *const *arguments, intptr_t count)
{
    enum { PLAN, TENSORS, OPTIONS, WORKSPACE, WORKSPACE_SIZE, ADDRESSES, PLANNING, CSR, COUNT };
    if (count != COUNT)
        return PyErr_Format(PyExc_TypeError, "launch takes %d arguments", (int)COUNT);
    void *const address = PyLong_AsVoidPtr(self);
    decode_function *decode;
    memcpy(&decode, &address, sizeof decode);
    void *values[COUNT] = { 0 };
    for (int32_t i = 0; i < COUNT; i++)
        if (i != ADDRESSES && !(values[i] = PyLong_AsVoidPtr(arguments[i])) && PyErr_Occurred())
            return NULL;
    const char *bytes = PyBytes_AsString(arguments[ADDRESSES]);
    if (!bytes)
        return NULL;
    void *addresses[NUM_PLACES];
    memcpy(addresses, bytes, sizeof addresses);
    ekv_tensors tensors = *(const ekv_tensors *)values[TENSORS];
    set_addresses(addresses, values[CSR] != NULL, &tensors);
    tensors.kv_len = values[PLANNING] ? addresses[KV_LEN] : NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const ekv_status status =
        decode(values[PLAN], &tensors, values[OPTIONS], values[WORKSPACE], (size_t)(uintptr_t)values[WORKSPACE_SIZE]);
    PyEval_RestoreThread(thread);
    return PyLong_FromLong(status);
}

/* ---- Start ----------------------------------------------------------------------------------------------- */

/* api: DLPack's function table of the tensors' type.  decode_address: of ekv_decode.  Returns (describe, launch), or
 * NULL with a Python exception where the table is of another version. */
EKV_API PyObject *evenkv_python_calls(const void *api, void *decode_address, PyObject *none_object);

PyObject *evenkv_python_calls(const void *api, void *decode_address, PyObject *none_object)
{
    static PyMethodDef methods[] = { { "describe", describe, METH_FASTCALL, NULL },
                                     { "launch", launch, METH_FASTCALL, NULL } };
    for (exchange = api; exchange && exchange->major != EXCHANGE_MAJOR;)
        exchange = exchange->older;
    if (!exchange || !exchange->view)
        return PyErr_Format(PyExc_TypeError, "no views through an exchange API of DLPack %d", (int)EXCHANGE_MAJOR);
    none = none_object;
    PyObject *const address = PyLong_FromVoidPtr(decode_address);
    PyObject *const made = pair(PyCFunction_NewEx(&methods[0], NULL, NULL),
                                address ? PyCFunction_NewEx(&methods[1], address, NULL) : NULL);
    Py_DecRef(address);
    return made;
}
