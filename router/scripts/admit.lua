-- KEYS: record, reserved
-- ARGV: copy when the claims are taken, copy when they are not, claims, live_ttl_s
return place(KEYS[1], KEYS[2], cjson.decode(ARGV[1]), cjson.decode(ARGV[2]), cjson.decode(ARGV[3]), ARGV[4])
