{{/* What values.schema.json cannot say: values that do not fit together. */}}

{{- define "tandem.checks" -}}
{{- $values := .Values -}}
{{- include "tandem.checkRedis" . -}}
{{- include "tandem.checkSecurity" . -}}
{{- include "tandem.checkModel" . -}}
{{- include "tandem.checkPorts" . -}}
{{- include "tandem.checkGroups" . -}}
{{- range $name := list "UCX_TLS" "UCX_NET_DEVICES" "UCX_TCP_PORT_RANGE" "UCX_USE_MT_MUTEX" "UCX_TCP_CONN_NB" -}}
{{- if hasKey ($values.rdma.ucx | default dict) $name -}}
{{- fail (printf "rdma.ucx.%s is set by the members themselves: leave it out (devices are rdma.netDevices)" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $values.metrics.monitor.kind "none") (not $values.metrics.enabled) -}}
{{- fail (printf "metrics.monitor.kind is %s and metrics.enabled is false: there is nothing to read" $values.metrics.monitor.kind) -}}
{{- end -}}
{{- include "tandem.checkScaling" . -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $drain := (get $values $role).drain -}}
{{- if gt (float64 $drain.settleSeconds) (float64 $drain.timeoutSeconds) -}}
{{- fail (printf "%s.drain.settleSeconds is %v: it must be at most %s.drain.timeoutSeconds, %v" $role $drain.settleSeconds $role $drain.timeoutSeconds) -}}
{{- end -}}
{{- $own := include "tandem.ownSettings" $ | fromYaml -}}
{{- if ne $role "router" -}}
{{- $_ := set $own "total_pages" (printf "%s.totalPages" $role) -}}
{{- end -}}
{{- range $name, $_ := (get $values $role).settings -}}
{{- if not (regexMatch "^[a-z][a-z0-9_]*$" $name) -}}
{{- fail (printf "%s.settings.%s is no name of a setting: write it as in --help with underscores, %s" $role $name (trimPrefix "--" $name | lower | replace "-" "_")) -}}
{{- end -}}
{{- if hasKey $own $name -}}
{{- $instead := get $own $name -}}
{{- fail (printf "%s.settings.%s is given by the chart itself%s" $role $name (ternary (printf ": use %s" $instead) "" (ne $instead ""))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkSecurity" -}}
{{- $tls := .Values.tls -}}
{{- $jwt := .Values.auth.jwt -}}
{{- if and $tls.enabled (not $tls.secretName) -}}
{{- fail "tls.enabled is true and tls.secretName is empty: name the secret that holds tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and $tls.clientCertificates (not $tls.enabled) -}}
{{- fail "tls.clientCertificates is true and tls.enabled is false: certificates are part of TLS" -}}
{{- end -}}
{{- if and .Values.router.http.ui (not .Values.router.http.enabled) -}}
{{- fail "router.http.ui is true and router.http.enabled is false: the live page is a part of the HTTP door" -}}
{{- end -}}
{{- if and $jwt.secretName $jwt.jwksUrl -}}
{{- fail "auth.jwt.secretName and auth.jwt.jwksUrl are both set: keep one" -}}
{{- end -}}
{{- if or $jwt.secretName $jwt.jwksUrl -}}
{{- range $name := list "issuer" "audience" -}}
{{- if not (get $jwt $name) -}}
{{- fail (printf "auth.jwt.%s is empty: tokens of anybody else would be taken, so it is required" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (or $jwt.secretName $jwt.jwksUrl .Values.auth.tokens.secretName) (not (or .Values.auth.cellSecret.secretName (and $tls.enabled $tls.clientCertificates))) -}}
{{- fail "auth.tokens and auth.jwt need auth.cellSecret.secretName, or tls.clientCertificates: routers pass calls on to one another, and have to know that they may" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkRedis" -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.url $redis.secretName -}}
{{- fail "redis.url and redis.secretName are both set: keep one" -}}
{{- end -}}
{{- if and (include "tandem.ownValkey" .) (or $redis.tls.secretName $redis.sentinel.secretName $redis.sentinel.username) -}}
{{- fail "redis.tls and redis.sentinel are for a Redis of your own: set redis.secretName or redis.url" -}}
{{- end -}}
{{- if and $redis.tls.secretName $redis.url (not (hasPrefix "rediss" $redis.url)) -}}
{{- fail (printf "redis.tls.secretName is set and redis.url is %s: TLS needs a scheme that begins with rediss" $redis.url) -}}
{{- end -}}
{{- if and $redis.tls.clientCertificate (not $redis.tls.secretName) -}}
{{- fail "redis.tls.clientCertificate is true and redis.tls.secretName is empty: name the secret that holds tls.crt and tls.key" -}}
{{- end -}}
{{- end -}}

{{/*
Pods of groups have longer names than those of Deployments: a controller of a group puts "-" and ten characters behind the name
of the group's first pod and makes a label of it, which has at most 63.
*/}}
{{- define "tandem.checkGroups" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $own := dict "root" $ "role" $role -}}
{{- if include "tandem.isGrouped" $own -}}
{{- if ne (get $.Values $role).strategy.type "RollingUpdate" -}}
{{- fail (printf "%s.strategy.type is %s: with %s.tensorParallel.hosts over 1 it must be RollingUpdate" $role (get $.Values $role).strategy.type $role) -}}
{{- end -}}
{{- $most := 36 -}}
{{- if gt (len (include "tandem.fullname" $)) $most -}}
{{- fail (printf "the name %s is too long for groups of pods: with %s.tensorParallel.hosts over 1 give a fullnameOverride of at most %d characters" (include "tandem.fullname" $) $role $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkModel" -}}
{{- $model := .Values.model -}}
{{- $cache := .Values.modelCache -}}
{{- if and $cache.readOnly (not $cache.existingClaim) -}}
{{- fail "modelCache.readOnly is true and modelCache.existingClaim is empty: an empty folder that nobody may fill holds no model" -}}
{{- end -}}
{{- if and $cache.readOnly $model.pull -}}
{{- fail "model.pull is true and modelCache.readOnly is true: pulling writes, so set one of them to false" -}}
{{- end -}}
{{- if not (or $model.pull $cache.existingClaim (hasPrefix "/" $model.name)) -}}
{{- fail (printf "model.name %s would be nowhere: set model.pull, or a modelCache.existingClaim that holds it, or name an absolute path" $model.name) -}}
{{- end -}}
{{- end -}}

{{/* 64 writers at once and their successors: a decode member keeps an agent, with a port, for each prefill process. */}}
{{- define "tandem.checkPorts" -}}
{{- $range := splitList "-" .Values.transfer.portRange -}}
{{- $low := index $range 0 | int -}}
{{- $high := index $range 1 | int -}}
{{- if or (lt $low 1024) (gt $high 65535) (lt (sub (add $high 1) $low) 72) -}}
{{- fail (printf "transfer.portRange is %s: it must be low-high from 1024 to 65535 with at least 72 ports" .Values.transfer.portRange) -}}
{{- end -}}
{{- range $name, $port := dict "memberPort" .Values.memberPort "metrics.port" .Values.metrics.port "tls.healthPort" .Values.tls.healthPort -}}
{{- if and (ge (int $port) $low) (le (int $port) $high) -}}
{{- fail (printf "%s is %d, inside transfer.portRange %s: move one of them" $name (int $port) $.Values.transfer.portRange) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.checkOwnPorts" (dict "root" . "ports" (dict "router.port" .Values.router.port)) -}}
{{- include "tandem.checkOwnPorts" (dict "root" . "ports" (dict "memberPort" .Values.memberPort)) -}}
{{- end -}}

{{/* No two ports of one pod are the same. Call with (dict "root" $ "ports" (dict "router.port" 50051)). */}}
{{- define "tandem.checkOwnPorts" -}}
{{- $values := .root.Values -}}
{{- $ports := .ports -}}
{{- if $values.metrics.enabled }}{{ $_ := set $ports "metrics.port" $values.metrics.port }}{{ end -}}
{{- if $values.tls.enabled }}{{ $_ := set $ports "tls.healthPort" $values.tls.healthPort }}{{ end -}}
{{- if and $values.router.http.enabled (hasKey $ports "router.port") }}{{ $_ := set $ports "router.http.port" $values.router.http.port }}{{ end -}}
{{- $seen := dict -}}
{{- range $name := keys $ports | sortAlpha -}}
{{- $port := get $ports $name | int | toString -}}
{{- if hasKey $seen $port -}}
{{- fail (printf "%s and %s are both %s: move one of them" (get $seen $port) $name $port) -}}
{{- end -}}
{{- $_ := set $seen $port $name -}}
{{- end -}}
{{- end -}}
