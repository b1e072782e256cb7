/* What tests in C end with: the line, and what went wrong there. */
#ifndef CHECK_H
#define CHECK_H

#include <outcore.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Calls with a place for an error, which says what went wrong. */
#define STATUS(wanted, call)                                                                                           \
    do {                                                                                                               \
        outcore_error *error = NULL;                                                                                   \
        outcore_status status = (call);                                                                                \
        if (status != (wanted)) {                                                                                      \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call, outcore_status_name(status),             \
                    error ? outcore_error_text(error) : "");                                                           \
            exit(1);                                                                                                   \
        }                                                                                                              \
        CHECK((error == NULL) == (status == OUTCORE_OK || status == OUTCORE_NOT_READY));                               \
        outcore_error_free(error);                                                                                     \
    } while (0)
#define OK(call) STATUS(OUTCORE_OK, call)

#endif
