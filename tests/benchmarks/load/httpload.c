// HTTP/1.1 load: one thread, epoll, connections kept alive, requests read from files beforehand.
//
// usage: httpload HOST PORT CONNECTIONS RATE WARM_S SECONDS MIN_ANSWERS LIMIT_S ANSWER_PREFIX REQUEST...
//
// RATE 0 is a closed loop: each connection asks again once it is answered. Any other is an open loop: so many requests
// a second, all in turn, whatever becomes of those before, each on a connection that has none under way; where all
// have, it is not sent, and counted. What is said here of the end holds for the closed loop.
//
// Connection i begins with request i % num_requests and goes round all of them, so that a server which favours short
// requests is sent no more of them. Answers count for SECONDS after WARM_S, and on until MIN_ANSWERS have come or a
// connection broke. Then only requests that nobody has under way are sent once more, and all answers are awaited, so
// that the server is idle at the end and its time can be divided by all answers. An answer to request k goes to
// ANSWER_PREFIX.k, the first answer that is not 200 to ANSWER_PREFIX.bad, body alone; figures go to stdout as one JSON
// object. Latencies are those of 200, from sending to the last byte; "refused" has those of all other answers, and
// "requests" statuses and latencies for each request by itself.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { NUM_STATUSES = 600, FIRST_ROOM = 1 << 18, MIN_ROOM = 1 << 16, MAX_EVENTS = 256, POLL_MS = 20 };
static const double RETRY_S = 0.05;

struct bytes {
    char *start;
    size_t length;
};

struct connection {
    int fd; // -1: not connected
    int request;
    bool in_flight, sending, polls_for_room;
    size_t sent;
    double began;
    char *answer;
    size_t room, received, head_length, whole_length;
    bool has_head, is_chunked;
    int status;
};

static struct sockaddr_in address;
static int poller, num_requests;
static struct bytes *requests;
static const char *answer_prefix;

struct latency {
    double seconds;
    int request;
};

struct latencies {
    struct latency *of;
    size_t count, room;
};

static double count_from, count_to, last_counted;
static size_t min_answers;
static struct latencies counted, refused;
static long statuses[NUM_STATUSES], (*request_statuses)[NUM_STATUSES];
static long connection_errors, reconnects;
// Of the open loop: connections without a request, the request whose turn it is, what was due and what could not be sent.
static double rate;
static struct connection **idle;
static size_t num_idle;
static int next_in_turn;
static long num_due, num_not_sent;
// Last: what is sent while stopping, whose answer is kept.
static bool stopping, *is_last_sent, *is_saved, bad_saved;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void *need(void *memory) {
    if (!memory) die("memory");
    return memory;
}

static struct bytes read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    struct bytes content = {.length = ftell(file)};
    rewind(file);
    content.start = need(malloc(content.length + 1));
    if (fread(content.start, 1, content.length, file) != content.length) die(path);
    fclose(file);
    return content;
}

static void save_answer(const struct connection *c, const char *suffix) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%s", answer_prefix, suffix);
    FILE *file = fopen(path, "wb");
    if (!file) die(path);
    fwrite(c->answer + c->head_length, 1, c->received - c->head_length, file);
    fclose(file);
}

static bool dial(struct connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(c->fd, (void *)&address, sizeof address)) {
        close(c->fd);
        c->fd = -1;
        connection_errors++;
        return false;
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    c->polls_for_room = false;
    return true;
}

static void hang_up(struct connection *c) {
    close(c->fd);
    c->fd = -1;
    // One that is idle in the open loop stands among the idle ones already.
    if (rate && c->in_flight) idle[num_idle++] = c;
    c->in_flight = false;
}

static void fail(struct connection *c) {
    connection_errors++;
    hang_up(c);
}

static void poll_for_room(struct connection *c, bool wanted) {
    if (wanted == c->polls_for_room) return;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    c->polls_for_room = wanted;
}

// Sends what the socket takes; false when the connection is broken.
static bool send_more(struct connection *c) {
    const struct bytes *request = &requests[c->request];
    while (c->sent < request->length) {
        ssize_t taken = send(c->fd, request->start + c->sent, request->length - c->sent, MSG_NOSIGNAL);
        if (taken < 0) {
            if (errno != EAGAIN) return false;
            poll_for_room(c, true);
            return true;
        }
        c->sent += taken;
    }
    c->sending = false;
    poll_for_room(c, false);
    return true;
}

static void start_request(struct connection *c) {
    c->sent = c->received = c->whole_length = 0;
    c->has_head = c->is_chunked = false;
    c->sending = c->in_flight = true;
    c->began = now();
    if (!send_more(c)) fail(c);
}

static void make_room(struct connection *c, size_t room) {
    if (room <= c->room) return;
    c->room = room;
    c->answer = need(realloc(c->answer, room));
}

// Reads the head once it is whole. An interim answer (100) is dropped and the next head awaited.
static void read_head(struct connection *c) {
    for (;;) {
        char *end = memmem(c->answer, c->received, "\r\n\r\n", 4);
        if (!end) return;
        c->head_length = end - c->answer + 4;
        end[2] = 0;
        c->status = atoi(c->answer + 9);
        if (c->status != 100) break;
        c->received -= c->head_length;
        memmove(c->answer, c->answer + c->head_length, c->received);
    }
    c->has_head = true;
    const char *length = strcasestr(c->answer, "\ncontent-length:");
    c->is_chunked = !length && strcasestr(c->answer, "\ntransfer-encoding: chunked");
    c->whole_length = c->head_length + (length ? strtoull(length + 16, NULL, 10) : 0);
    make_room(c, c->whole_length + MIN_ROOM + 1);
}

// Takes in what has come: 1 when the answer is whole, 0 when more must come, -1 when the connection is broken.
static int receive_more(struct connection *c) {
    for (;;) {
        if (c->room - c->received < MIN_ROOM) make_room(c, c->room ? c->room * 2 : FIRST_ROOM);
        ssize_t came = recv(c->fd, c->answer + c->received, c->room - c->received, 0);
        if (came == 0) return -1;
        if (came < 0) return errno == EAGAIN ? 0 : -1;
        c->received += came;
        if (!c->has_head) read_head(c);
        if (!c->has_head) continue;
        if (c->is_chunked) {
            if (c->received >= 5 && !memcmp(c->answer + c->received - 5, "0\r\n\r\n", 5)) return 1;
        } else if (c->received >= c->whole_length) {
            return 1;
        }
    }
}

static void keep(struct latencies *list, double seconds, int request) {
    if (list->count == list->room) {
        list->room = list->room ? list->room * 2 : 1 << 16;
        list->of = need(realloc(list->of, list->room * sizeof *list->of));
    }
    list->of[list->count++] = (struct latency){seconds, request};
}

static void count_answer(struct connection *c) {
    double t = now();
    int status = c->status > 0 && c->status < NUM_STATUSES ? c->status : NUM_STATUSES - 1;
    statuses[status]++;
    request_statuses[c->request][status]++;
    if (c->status != 200) {
        if (!bad_saved) save_answer(c, "bad");
        bad_saved = true;
        keep(&refused, t - c->began, c->request);
    } else if (t >= count_from && (t < count_to || counted.count < min_answers || rate)) {
        // In the open loop the last ones count too: those that waited longest are among them.
        keep(&counted, t - c->began, c->request);
        if (t < count_to || !rate) last_counted = t;
    }
    // Writing takes time, so it waits for the end, where nothing is counted any more.
    if (stopping && !rate && !is_saved[c->request]) {
        char suffix[16];
        snprintf(suffix, sizeof suffix, "%d", c->request);
        save_answer(c, suffix);
        is_saved[c->request] = true;
    }
}

// Chooses what the connection sends next; false when nothing is left.
static bool next_request(struct connection *c) {
    for (int i = 0; i < num_requests; i++) {
        c->request = (c->request + 1) % num_requests;
        if (!stopping) return true;
        if (!is_last_sent[c->request]) {
            is_last_sent[c->request] = true;
            return true;
        }
    }
    return false;
}

static void finish_request(struct connection *c) {
    bool must_close = c->sending || strcasestr(c->answer, "\nconnection: close");
    count_answer(c);
    if (rate) {
        if (must_close) {
            hang_up(c);
            reconnects++;
        } else {
            c->in_flight = false;
            idle[num_idle++] = c;
        }
        return;
    }
    c->in_flight = false;
    if (!next_request(c)) return;
    if (must_close) {
        hang_up(c);
        reconnects++;
        if (!dial(c)) return;
    }
    start_request(c);
}

static void handle_event(struct connection *c, uint32_t events) {
    if (c->fd < 0) return;
    if ((events & EPOLLOUT) && c->sending && !send_more(c) && !(events & EPOLLIN)) {
        fail(c);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    int whole = receive_more(c);
    if (whole < 0) {
        // An idle connection that the server closes at the end is no error.
        if (c->in_flight) fail(c);
        else hang_up(c);
    } else if (whole && c->in_flight) {
        finish_request(c);
    }
}

// What is due by now in the open loop, on the connections that were idle last: few are open where few are needed.
static void send_due(double began) {
    double t = now();
    for (; began + num_due / rate <= t && began + num_due / rate < count_to; num_due++) {
        int request = next_in_turn;
        next_in_turn = (next_in_turn + 1) % num_requests;
        if (!num_idle) {
            num_not_sent++;
            continue;
        }
        struct connection *c = idle[--num_idle];
        c->request = request;
        if (c->fd < 0 && !dial(c)) {
            idle[num_idle++] = c;
            num_not_sent++;
            continue;
        }
        start_request(c);
    }
}

static int by_length(const void *a, const void *b) {
    double x = ((const struct latency *)a)->seconds, y = ((const struct latency *)b)->seconds;
    return (x > y) - (x < y);
}

static int by_request(const void *a, const void *b) {
    const struct latency *x = a, *y = b;
    return x->request != y->request ? (x->request > y->request) - (x->request < y->request) : by_length(a, b);
}

static double quantile_ms(const struct latency *sorted, size_t count, double share) {
    return count ? sorted[(size_t)((count - 1) * share)].seconds * 1e3 : -1;
}

static void print_quantiles(const struct latency *sorted, size_t count) {
    printf("\"p50_ms\":%.4f,\"p90_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f", quantile_ms(sorted, count, 0.5),
           quantile_ms(sorted, count, 0.9), quantile_ms(sorted, count, 0.99), quantile_ms(sorted, count, 1));
}

static void print_statuses(const long *of) {
    const char *separator = "";
    printf("\"statuses\":{");
    for (int i = 0; i < NUM_STATUSES; i++) {
        if (!of[i]) continue;
        printf("%s\"%d\":%ld", separator, i, of[i]);
        separator = ",";
    }
    printf("}");
}

static void report(double stopped_at, int unfinished) {
    double end = stopped_at < count_to ? stopped_at : last_counted > count_to ? last_counted : count_to;
    double window = end - count_from, sum = 0;
    long all = 0;
    qsort(counted.of, counted.count, sizeof *counted.of, by_length);
    qsort(refused.of, refused.count, sizeof *refused.of, by_length);
    for (size_t i = 0; i < counted.count; i++) sum += counted.of[i].seconds;
    for (int i = 0; i < NUM_STATUSES; i++) all += statuses[i];
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    printf("{\"counted\":%zu,\"window_s\":%.4f,\"requests_per_s\":%.3f,\"mean_ms\":%.4f,", counted.count, window,
           window > 0 ? counted.count / window : 0, counted.count ? sum / counted.count * 1e3 : -1);
    print_quantiles(counted.of, counted.count);
    printf(",\"all\":%ld,\"bad\":%ld,\"connection_errors\":%ld,\"reconnects\":%ld,\"unfinished\":%d,", all,
           all - statuses[200], connection_errors, reconnects, unfinished);
    printf("\"due\":%ld,\"not_sent\":%ld,\"client_cpu_s\":%.4f,", num_due, num_not_sent, cpu);
    print_statuses(statuses);
    printf(",\"refused\":{\"counted\":%zu,", refused.count);
    print_quantiles(refused.of, refused.count);
    printf("},\"requests\":[");
    qsort(counted.of, counted.count, sizeof *counted.of, by_request);
    size_t at = 0;
    for (int request = 0; request < num_requests; request++) {
        size_t first = at;
        while (at < counted.count && counted.of[at].request == request) at++;
        printf("%s{", request ? "," : "");
        print_quantiles(counted.of + first, at - first);
        printf(",");
        print_statuses(request_statuses[request]);
        printf("}");
    }
    printf("]}\n");
}

int main(int count, char **arguments) {
    if (count < 11) {
        fprintf(stderr, "usage: httpload HOST PORT CONNECTIONS RATE WARM_S SECONDS MIN_ANSWERS LIMIT_S ANSWER_PREFIX "
                        "REQUEST...\n");
        return 2;
    }
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(arguments[2]));
    if (inet_pton(AF_INET, arguments[1], &address.sin_addr) != 1) die(arguments[1]);
    int num_connections = atoi(arguments[3]);
    rate = atof(arguments[4]);
    double began = now(), give_up = began + atof(arguments[8]);
    count_from = began + atof(arguments[5]);
    count_to = count_from + atof(arguments[6]);
    min_answers = atol(arguments[7]);
    answer_prefix = arguments[9];
    num_requests = count - 10;
    requests = need(calloc(num_requests, sizeof *requests));
    is_last_sent = need(calloc(num_requests, sizeof *is_last_sent));
    is_saved = need(calloc(num_requests, sizeof *is_saved));
    for (int i = 0; i < num_requests; i++) requests[i] = read_file(arguments[10 + i]);
    request_statuses = need(calloc(num_requests, sizeof *request_statuses));
    idle = need(calloc(num_connections, sizeof *idle));

    poller = epoll_create1(0);
    struct connection *connections = need(calloc(num_connections, sizeof *connections));
    for (int i = 0; i < num_connections; i++) {
        connections[i].request = i % num_requests;
        connections[i].fd = -1;
        if (rate) idle[num_idle++] = &connections[num_connections - 1 - i];
        else if (dial(&connections[i])) start_request(&connections[i]);
    }
    struct epoll_event events[MAX_EVENTS];
    double t, stopped_at = 0, next_retry = 0;
    int in_flight = num_connections, poll_ms = rate ? 1 : POLL_MS;
    while ((t = now()) < give_up && (!stopping || in_flight)) {
        if (!stopping && t >= count_to && (rate || counted.count >= min_answers || connection_errors)) {
            stopping = true;
            stopped_at = t;
            for (int i = 0; i < num_connections; i++)
                if (connections[i].in_flight) is_last_sent[connections[i].request] = true;
        }
        if (rate) send_due(began);
        if (!rate && !stopping && t > next_retry) {
            next_retry = t + RETRY_S;
            for (int i = 0; i < num_connections; i++)
                if (connections[i].fd < 0 && dial(&connections[i])) start_request(&connections[i]);
        }
        int num_events = epoll_wait(poller, events, MAX_EVENTS, poll_ms);
        for (int i = 0; i < num_events; i++) handle_event(events[i].data.ptr, events[i].events);
        in_flight = 0;
        for (int i = 0; i < num_connections; i++) in_flight += connections[i].in_flight;
    }
    report(stopping ? stopped_at : t, in_flight);
    return 0;
}
